r"""Calls of Qwen3-Coder.

content\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.formats.hermes import CLOSE, OPEN
from swell.cluster.text.parsers.notations.markup import MarkupParser
from swell.cluster.text.parsers.notations.markup_grammar import Markup

QWEN_FUNCTION, QWEN_PARAMETER, QWEN_END = "<function=", "<parameter=", "</function>"


class Qwen3CoderParser(MarkupParser):
    """Parser for Qwen3-Coder. The model may forget `<tool_call>` after text, and `</parameter>` at
    the end of a line. Two newlines before `<tool_call>` belong to the template."""

    markers = (OPEN, CLOSE, QWEN_FUNCTION)
    start_markers = tuple("\n" * count + one for count in range(3) for one in (OPEN, QWEN_FUNCTION))
    section = OPEN
    end_markers = (CLOSE,)
    calls_share_section = False
    call_begin = QWEN_FUNCTION
    markup = Markup(
        name_end=">",
        key_begin=QWEN_PARAMETER,
        key_ends=(">",),
        value_end="</parameter>",
        call_ends=(QWEN_END, CLOSE),
        padding="\n",
        other_value_ends=tuple("\n" + one for one in (QWEN_PARAMETER, QWEN_END, CLOSE)),
    )
