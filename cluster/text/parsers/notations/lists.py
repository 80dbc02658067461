"""Calls that are elements of one list: `[{"name": "f", "arguments": {}}, ...]`, `[f(), g()]`."""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.call_reader import Call
from swell.cluster.text.parsers.marker_search import SPACE
from swell.cluster.text.parsers.text_reader import Reading
from swell.cluster.text.parsers.tool_parser import ToolParser


class ListParser(ToolParser):
    @abstractmethod
    def _new_element(self) -> Call:
        """Returns a reader of a call in the list."""

    @abstractmethod
    def _new_single(self) -> Call | None:
        """Returns a reader of a call without a list around it; None if the format lacks such
        calls."""

    def _read_calls(self, marker: str) -> Reading[None]:
        self._hold(marker)
        char = yield from self._through(SPACE, self._held.append)
        if char != "[":
            yield from self._read_single()
            return
        while True:
            self._at += 1
            if not (yield from self._read_call(char, self._new_element())):
                return
            char = yield from self._through(SPACE, self._leading_space.append)
            if char != ",":
                break
        if char == "]":
            self._at += 1
            self._leading_space.clear()
        yield from self._read_end()

    def _read_single(self) -> Reading[None]:
        single = self._new_single()
        if single is None:
            self._give_up()
        elif (yield from self._read_call("", single)):
            yield from self._read_end()
