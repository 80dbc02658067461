"""Calls as Phi-4-mini writes them.

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>
    functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]

The first is its own form; the second that of the prompt which vLLM's and Ollama's users give it.
Granite 3 writes the first without the mark at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.arrays import ArrayParser
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.end_marked import EndMarkedCallParser
from swell.cluster.text.parsers.grammar import CallGrammar

OPEN, CLOSE, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"


class Phi4Parser(ArrayParser, EndMarkedCallParser):
    markers = (OPEN, CLOSE)
    start_markers = (OPEN, FUNCTOOLS)
    end_markers = (CLOSE,)
    argument_keys = ("arguments", "parameters")

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        several = ' (", " call)*' if parallel else ""
        return CallGrammar(
            marker=OPEN,
            body=f'"[" call{several} "]" {grammar.mark(CLOSE, special)}',
            rules=grammar.json_calls(tools, "arguments"),
        )

    def _on_marker(self, marker: str) -> None:
        self._open_head(marker, self._before_array)

    def _on_call_end(self) -> None:
        self._state = self._after_element

    def _after_array(self, text: str, at: int) -> int:
        return self._after_call(text, at)
