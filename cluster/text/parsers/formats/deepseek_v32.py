r"""Calls of DeepSeek V3.2, in its "DSML".

content\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n
</｜DSML｜invoke>\n</｜DSML｜function_calls>
"""

from __future__ import annotations

from swell.cluster.text.parsers.notations.markup import MarkupParser
from swell.cluster.text.parsers.notations.markup_grammar import Markup

DSML = "｜DSML｜"
DSML_OPEN, DSML_CLOSE = f"<{DSML}function_calls>", f"</{DSML}function_calls>"


class DeepSeekV32Parser(MarkupParser):
    markers = (DSML_OPEN, DSML_CLOSE, DSML)
    start_markers = (DSML_OPEN, "\n" + DSML_OPEN, "\n\n" + DSML_OPEN)
    section = DSML_OPEN
    end_markers = (DSML_CLOSE,)
    call_begin = f'<{DSML}invoke name="'
    markup = Markup(
        name_end='">',
        key_begin=f'<{DSML}parameter name="',
        key_ends=('" string="true">', '" string="false">'),
        value_end=f"</{DSML}parameter>",
        call_ends=(f"</{DSML}invoke>", DSML_CLOSE),
    )
