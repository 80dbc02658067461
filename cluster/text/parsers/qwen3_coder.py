r"""Calls as Qwen3-Coder writes them.

    content\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>

The model may forget `<tool_call>` where text precedes, and `</parameter>` at the end of a line. Two
newlines before `<tool_call>` are the template's.
"""

from __future__ import annotations

from swell.cluster.text.parsers.hermes import CLOSE, OPEN
from swell.cluster.text.parsers.markup import Markup, MarkupParser

FUNCTION, END = "<function=", "</function>"
PARAMETER = "<parameter="


class Qwen3CoderParser(MarkupParser):
    markers = (OPEN, CLOSE, FUNCTION)
    start_markers = tuple("\n" * count + one for count in range(3) for one in (OPEN, FUNCTION))
    section = OPEN
    end_markers = (CLOSE,)
    calls_share_section = False
    call_begin = FUNCTION
    markup = Markup(
        name_end=">",
        key_begin=PARAMETER,
        key_ends=(">",),
        value_end="</parameter>",
        call_ends=(END, CLOSE),
        padding="\n",
        other_value_ends=tuple("\n" + one for one in (PARAMETER, END, CLOSE)),
    )
