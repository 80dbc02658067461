"""Calls in the formats of Phi-4-mini and Granite 3."""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.notations.json_call import CallReader
from swell.cluster.text.parsers.notations.lists import ListParser

PHI_OPEN, PHI_CLOSE, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"


class Phi4Parser(ListParser):
    """Parser for Phi-4-mini, and for Granite 3, which writes no end marker.

        <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>
        functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]

    The first is Phi's own form. The second follows the prompt that users of vLLM and Ollama give
    it.
    """

    markers = (PHI_OPEN, PHI_CLOSE)
    start_markers = (PHI_OPEN, FUNCTOOLS)
    end_markers = (PHI_CLOSE,)

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PHI_OPEN,
            body=f"{builder.call_list()} {builder.marker(PHI_CLOSE)}",
            rules=builder.json_calls("arguments"),
        )

    def _new_element(self) -> CallReader:
        return CallReader(argument_keys=("arguments", "parameters"))

    def _new_single(self) -> None:
        return None
