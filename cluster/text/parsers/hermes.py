r"""Calls as Hermes and Qwen write them.

    content\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>...

One newline before the first `<tool_call>` is the template's. Nobody is held to `</tool_call>`: the
answer may end without it, or the next call begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.end_marked import EndMarkedCallParser
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.json_stream import CallReader, end_of
from swell.cluster.text.parsers.tools import SPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(EndMarkedCallParser):
    markers = (OPEN, CLOSE)
    end_markers = (CLOSE,)
    start_markers = (OPEN, "\n" + OPEN)

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        body = f'"\\n" call "\\n" {grammar.mark(CLOSE, special)}'
        return CallGrammar(
            marker=OPEN,
            body=body,
            more=f'("\\n" {grammar.mark(OPEN, special)} {body})*' if parallel else "",
            rules=grammar.json_calls(tools, "arguments"),
        )

    def _on_marker(self, marker: str) -> None:
        self._open_head(marker, self._head)

    def _head(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._begin_call(CallReader(fence=CLOSE[0]))
        return end
