"""Calls in the formats of FunctionGemma and Gemma 4.

    <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>
    <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>

Gemma 3 does not have a format: its users prompt for Python's.
"""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.notations.notation import FUNCTION_GEMMA, GEMMA4, NotationCall
from swell.cluster.text.parsers.notations.notation_grammar import gemma_calls
from swell.cluster.text.parsers.tool_parser import ToolParser


class FunctionGemmaParser(ToolParser):
    start_markers = ("<start_function_call>",)
    end_markers = ("<end_function_call>",)
    notation = FUNCTION_GEMMA
    markers = (*start_markers, *end_markers, notation.mark)
    keeps_special_tokens = True

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        (start,), (end,) = cls.start_markers, cls.end_markers
        body = f"call {builder.marker(end)}"
        return CallGrammar(
            marker=start,
            body=body,
            more=builder.repeated(f"{builder.marker(start)} {body}"),
            rules=gemma_calls(builder.tools, cls.notation, builder.special),
        )

    def _marked_call(self, marker: str) -> NotationCall:
        return NotationCall(self.notation)


class Gemma4Parser(FunctionGemmaParser):
    start_markers = ("<|tool_call>",)
    end_markers = ("<tool_call|>",)
    notation = GEMMA4
    markers = (*start_markers, *end_markers, notation.mark)
