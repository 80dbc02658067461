"""Calls that stand in one JSON array: `[{"name": "f", "arguments": {}}, ...]`."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.json_stream import CallReader
from swell.cluster.text.parsers.tools import SPACE, ToolParser


class ArrayParser(ToolParser):
    argument_keys: tuple[str, ...] = ("arguments",)

    def _hold(self, pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
        end = end_of(pattern, text, at)
        self._held.append(text[at:end])
        return text[at:end], end

    def _before_array(self, text: str, at: int) -> int:
        _, at = self._hold(SPACE, text, at)
        if at == len(text):
            return at
        if text[at] != "[":
            self._give_up()
            return at
        self._held.append("[")
        self._state = self._before_element
        return at + 1

    def _before_element(self, text: str, at: int) -> int:
        _, at = self._hold(SPACE, text, at)
        if at < len(text):
            self._begin_call(CallReader(argument_keys=self.argument_keys))
        return at

    def _after_element(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == ",":
            self._open_head(",", self._before_element)
            return end + 1
        self._state = self._after_array
        if text[end] != "]":
            return end
        self._leading_space.clear()
        return end + 1

    def _after_array(self, text: str, at: int) -> int:
        self._state = self._gap
        return at
