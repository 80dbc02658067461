r"""Calls in the format of Hermes and Qwen.

    content\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>...

One newline before the first `<tool_call>` belongs to the template.
"""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.notations.json_call import CallReader
from swell.cluster.text.parsers.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    markers = (OPEN, CLOSE)
    start_markers = (OPEN, "\n" + OPEN)
    end_markers = (CLOSE,)

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        body = f'"\\n" call "\\n" {builder.marker(CLOSE)}'
        return CallGrammar(
            marker=OPEN,
            body=body,
            more=builder.repeated(f'"\\n" {builder.marker(OPEN)} {body}'),
            rules=builder.json_calls("arguments"),
        )

    def _marked_call(self, marker: str) -> CallReader:
        return CallReader(fence=CLOSE[0])
