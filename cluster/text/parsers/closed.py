"""Formats with a mark behind a call. It is not required: the answer may end without it."""

from __future__ import annotations

from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.parts import Part
from swell.cluster.text.parsers.tools import SPACE, ToolParser


class ClosedCallParser(ToolParser):
    closers: tuple[str, ...]
    """One of them may stand behind a call, or behind several."""

    def _on_call_end(self) -> None:
        self._state = self._behind_call

    def _behind_call(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._lead.append(text[at:end])
        if end < len(text):
            self._closer = Matcher(*self.closers)
            self._state = self._closing
        return end

    def _closing(self, text: str, at: int) -> int:
        """At the first character that is not whitespace: a closer begins here or nowhere."""
        shown, marker, at = self._closer.push(text, at)
        if shown:
            self._state = self._content
            self._read(shown + (marker or "") + self._closer.flush())
        elif marker:
            self._lead.clear()
            self._state = self._gap
        return at

    def flush(self) -> list[Part]:
        if self._state == self._closing:
            self._state = self._content
            self._read(self._closer.flush())
        return super().flush()
