r"""Calls as MiniMax M2 writes them.

content\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n
</minimax:tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.markup import Markup, MarkupParser

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMaxM2Parser(MarkupParser):
    markers = (OPEN, CLOSE)
    start_markers = (OPEN, "\n" + OPEN)
    section = OPEN
    end_markers = (CLOSE,)
    call_begin = '<invoke name="'
    markup = Markup(
        name_end='">',
        key_begin='<parameter name="',
        key_ends=('">',),
        value_end="</parameter>",
        call_ends=("</invoke>", CLOSE),
    )
