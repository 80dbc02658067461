r"""Formats whose calls have one element for each argument.

GLM 4.5, 4.6 and 4.7; the last without newlines:
    content\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
MiniMax M2:
    content\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n
    </invoke>\n</minimax:tool_call>
DeepSeek V3.2, in its "DSML":
    content\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n
    <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n
    </｜DSML｜invoke>\n</｜DSML｜function_calls>
Qwen3-Coder:
    content\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.hermes import CLOSE, OPEN
from swell.cluster.text.parsers.markup import Markup, MarkupParser

GLM_KEY, GLM_KEY_END = "<arg_key>", "</arg_key>"
GLM_VALUE, GLM_VALUE_END = "<arg_value>", "</arg_value>"
MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
DSML = "｜DSML｜"
DSML_OPEN, DSML_CLOSE = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
QWEN_FUNCTION, QWEN_PARAMETER, QWEN_END = "<function=", "<parameter=", "</function>"


class GlmParser(MarkupParser):
    markers = (OPEN, CLOSE, GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END)
    start_markers = (OPEN, "\n" + OPEN)
    section = OPEN
    calls_share_section = False
    markup = Markup(
        name_end="",
        key_begin=GLM_KEY,
        key_ends=(GLM_KEY_END,),
        value_begin=GLM_VALUE,
        value_end=GLM_VALUE_END,
        call_ends=(CLOSE,),
    )


class MiniMaxM2Parser(MarkupParser):
    markers = (MINIMAX_OPEN, MINIMAX_CLOSE)
    start_markers = (MINIMAX_OPEN, "\n" + MINIMAX_OPEN)
    section = MINIMAX_OPEN
    end_markers = (MINIMAX_CLOSE,)
    call_begin = '<invoke name="'
    markup = Markup(
        name_end='">',
        key_begin='<parameter name="',
        key_ends=('">',),
        value_end="</parameter>",
        call_ends=("</invoke>", MINIMAX_CLOSE),
    )


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


class Qwen3CoderParser(MarkupParser):
    """The model may forget `<tool_call>` where text precedes, and `</parameter>` at the end of a
    line. Two newlines before `<tool_call>` are the template's."""

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
