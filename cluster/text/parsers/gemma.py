"""Calls as FunctionGemma and Gemma 4 write them.

    <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>
    <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>

Gemma 3 has no format of its own: its users ask for Python's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, end_of
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.end_marked import EndMarkedCallParser
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.notation import FUNCTION_GEMMA, GEMMA4, NotationCall
from swell.cluster.text.parsers.notation_grammar import gemma_calls
from swell.cluster.text.parsers.tools import SPACE

_PREFIX = "call:"
_NAME = re.compile(r"[-.\w]*")


class FunctionGemmaParser(EndMarkedCallParser):
    start_markers = ("<start_function_call>",)
    end_markers = ("<end_function_call>",)
    notation = FUNCTION_GEMMA
    markers = (*start_markers, *end_markers, notation.mark)
    keeps_special_tokens = True

    _head = ""
    """The beginning of `call:` and the name."""

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        (marker,), (closer,) = cls.start_markers, cls.end_markers
        body = f"call {grammar.mark(closer, special)}"
        return CallGrammar(
            marker=marker,
            body=body,
            more=f"({grammar.mark(marker, special)} {body})*" if parallel else "",
            rules=gemma_calls(tools, cls.notation.mark, special),
        )

    def _on_marker(self, marker: str) -> None:
        self._head = ""
        self._open_head(marker, self._before_head)

    def _before_head(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._state = self._in_head
        return end

    def _in_head(self, text: str, at: int) -> int:
        size = len(self._head)
        if size < len(_PREFIX):
            if text[at] != _PREFIX[size]:
                self._give_up()
                return at
            end = at + 1
        else:
            end = end_of(_NAME, text, at)
        self._held.append(text[at:end])
        self._head += text[at:end]
        name = self._head[len(_PREFIX) :]
        if len(name) > MAX_NAME_CHARS:
            self._give_up()
        elif end < len(text) and size >= len(_PREFIX):
            if text[end] != "{" or not name:
                self._give_up()
                return end
            self._held.append("{")
            self._begin_call(NotationCall(name, self.notation))
            return end + 1
        return end


class Gemma4Parser(FunctionGemmaParser):
    start_markers = ("<|tool_call>",)
    end_markers = ("<tool_call|>",)
    notation = GEMMA4
    markers = (*start_markers, *end_markers, notation.mark)
