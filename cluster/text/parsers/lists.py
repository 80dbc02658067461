"""Calls that are elements of one list: `[{"name": "f", "arguments": {}}, ...]`, `[f(), g()]`."""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.calls import SPACE, Call, end_of
from swell.cluster.text.parsers.tools import ToolParser


class ListParser(ToolParser):
    _in_list = False

    @abstractmethod
    def _new_element(self) -> Call:
        """Reads a call of the list."""

    @abstractmethod
    def _new_single(self) -> Call | None:
        """Reads a call that has no list around it; None: there are none."""

    def _on_marker(self, marker: str) -> None:
        self._hold(marker, self._before_list)

    def _before_list(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end == len(text):
            return end
        self._in_list = text[end] == "["
        if self._in_list:
            self._open_call("[", self._new_element())
            return end + 1
        single = self._new_single()
        if single is None:
            self._give_up()
        else:
            self._begin_call(single)
        return end

    def _on_call_end(self) -> None:
        if self._in_list:
            self._state = self._after_element
        else:
            super()._on_call_end()

    def _after_element(self, text: str, at: int) -> int:
        end = self._read_lead(text, at)
        if end == len(text):
            return end
        if text[end] == ",":
            self._open_call(",", self._new_element())
            return end + 1
        super()._on_call_end()
        if text[end] == "]":
            self._leading_space.clear()
            return end + 1
        return end
