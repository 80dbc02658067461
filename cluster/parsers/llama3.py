"""Calls as Llama 3.1 and later write them.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}

Without `<|python_tag|>` a call stands where the answer begins or behind another call, and has no
keys but its own, so that an answer that is JSON streams as content from its first other key on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from swell.cluster.parsers import grammar
from swell.cluster.parsers.grammar import CallGrammar
from swell.cluster.parsers.json_stream import CallReader, end_of
from swell.cluster.parsers.parts import Tool
from swell.cluster.parsers.tools import SPACE, ToolParser

PYTHON_TAG = "<|python_tag|>"

_SEPARATOR = re.compile(r"[ \t\r\n;]*")
_ARGUMENT_KEYS = ("parameters", "arguments")
_OTHER_KEYS = ("type", "id")


class Llama3Parser(ToolParser):
    markers = openers = (PYTHON_TAG,)
    keeps_special_tokens = True

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_TAG,
            body="call",
            more='("; " call)*' if parallel else "",
            rules=grammar.json_calls(tools, "parameters"),
            bare="{",
        )

    def _on_marker(self, marker: str) -> None:
        self._open_head(marker, self._head)

    def _gap(self, text: str, at: int) -> int:
        end = end_of(_SEPARATOR if self._num_calls else SPACE, text, at)
        self._lead.append(text[at:end])
        if end == len(text):
            return end
        self._state = self._content
        if text[end] == "{":
            self._open_head("", self._head)
            self._begin_call(CallReader(argument_keys=_ARGUMENT_KEYS, other_keys=_OTHER_KEYS))
        return end

    def _head(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end < len(text):
            self._begin_call(CallReader(argument_keys=_ARGUMENT_KEYS))
        return end
