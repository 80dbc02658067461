"""Calls in Python's notation."""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.notations.lists import ListParser
from swell.cluster.text.parsers.notations.notation import PYTHON, NotationCall
from swell.cluster.text.parsers.notations.notation_grammar import python_calls
from swell.cluster.text.parsers.text_reader import Reading

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
TOOL_CODE, FENCE = "```tool_code", "```"


class PythonicParser(ListParser):
    """Parser for calls in Python's notation: Llama 3.2 and 4, and the prompt that Google recommends
    for Gemma 3.

        [f(a=1, b="x"), g()]
        <|python_start|>[f(a=1, b="x")]<|python_end|>
        ```tool_code
        f(a=1, b="x")
        ```

    A list without a marker is read only at the beginning of the answer, after whitespace.
    Arguments have names and literal values; any other Python is not a call.
    """

    markers = (PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_START, TOOL_CODE)
    end_markers = (PYTHON_END, FENCE)

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_START,
            body=builder.call_list(),
            rules=python_calls(builder.tools),
            bare="[",
        )

    def _read_start(self) -> Reading[None]:
        yield from self._read_gap()
        if self._text[self._at] == "[":
            yield from self._read_calls("")

    def _new_element(self) -> NotationCall:
        return NotationCall(PYTHON)

    _new_single = _new_element
