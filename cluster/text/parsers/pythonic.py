"""Calls as Python writes them."""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.lists import ListParser
from swell.cluster.text.parsers.notation import PYTHON, NotationHead
from swell.cluster.text.parsers.notation_grammar import python_calls

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
TOOL_CODE, FENCE = "```tool_code", "```"


class PythonicParser(ListParser):
    """As Python writes calls: Llama 3.2 and 4, and what Google recommends for Gemma 3.

        [f(a=1, b="x"), g()]
        <|python_start|>[f(a=1, b="x")]<|python_end|>
        ```tool_code
        f(a=1, b="x")
        ```

    A list without a marker is read where the answer begins, behind whitespace. Arguments have names
    and literal values; what else Python allows is no call.
    """

    markers = (PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_START, TOOL_CODE)
    end_markers = (PYTHON_END, FENCE)

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_START,
            body=builder.call_list(),
            rules=python_calls(builder.tools),
            bare="[",
        )

    def _gap(self, text: str, at: int) -> int:
        end = super()._gap(text, at)
        if end < len(text) and text[end] == "[" and not self._num_calls:
            self._hold("", self._before_list)
        return end

    def _new_element(self) -> NotationHead:
        return NotationHead(PYTHON)

    _new_single = _new_element
