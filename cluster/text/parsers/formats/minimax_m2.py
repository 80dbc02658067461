r"""Calls of MiniMax M2.

content\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n
</invoke>\n</minimax:tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.notations.markup import MarkupParser
from swell.cluster.text.parsers.notations.markup_grammar import Markup

MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


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
