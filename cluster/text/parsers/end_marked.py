"""Formats with a mark behind a call. It is not required: the answer may end without it."""

from __future__ import annotations

from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.deltas import AnswerDelta
from swell.cluster.text.parsers.tools import SPACE, ToolParser


class EndMarkedCallParser(ToolParser):
    end_markers: tuple[str, ...]
    """One of them may stand behind a call, or behind several."""

    def _on_call_end(self) -> None:
        self._state = self._after_call

    def _after_call(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end < len(text):
            self._end_matcher = Matcher(*self.end_markers)
            self._state = self._closing
        return end

    def _closing(self, text: str, at: int) -> int:
        """At the first character that is not whitespace: a closer begins here or nowhere."""
        shown, marker, at = self._end_matcher.push(text, at)
        if shown:
            self._state = self._content
            self._read(shown + (marker or "") + self._end_matcher.flush())
        elif marker:
            self._leading_space.clear()
            self._state = self._gap
        return at

    def flush(self) -> list[AnswerDelta]:
        if self._state == self._closing:
            self._state = self._content
            self._read(self._end_matcher.flush())
        return super().flush()
