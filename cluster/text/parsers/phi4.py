"""Calls as Phi-4-mini writes them.

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>
    functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]

The first is its own form; the second that of the prompt which vLLM's and Ollama's users give it.
Granite 3 writes the first without the end marker.
"""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_call import CallReader
from swell.cluster.text.parsers.lists import ListParser

OPEN, CLOSE, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"


class Phi4Parser(ListParser):
    markers = (OPEN, CLOSE)
    start_markers = (OPEN, FUNCTOOLS)
    end_markers = (CLOSE,)

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=OPEN,
            body=f"{builder.call_list()} {builder.marker(CLOSE)}",
            rules=builder.json_calls("arguments"),
        )

    def _new_element(self) -> CallReader:
        return CallReader(argument_keys=("arguments", "parameters"))

    def _new_single(self) -> None:
        return None
