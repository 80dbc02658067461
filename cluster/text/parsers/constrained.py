"""Parsers of answers that follow a grammar, which makes more of an answer certain."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.parsers.calls import SPACE, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Content
from swell.cluster.text.parsers.tools import ToolParser


class WrappedParser(Parser):
    """Another parser, of whose deltas some are dropped."""

    def __init__(self, parser: Parser) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser

    def push(self, text: str) -> list[AnswerDelta]:
        return self._parser.push(text)

    def flush(self) -> list[AnswerDelta]:
        return self._parser.flush()


class RequiredCallsParser(WrappedParser):
    """The grammar requires calls, so nothing is content: not the beginning of a call either, where
    the answer was cut off."""

    def push(self, text: str) -> list[AnswerDelta]:
        return _without_content(super().push(text))

    def flush(self) -> list[AnswerDelta]:
        return _without_content(super().flush())


def _without_content(deltas: list[AnswerDelta]) -> list[AnswerDelta]:
    return [delta for delta in deltas if not isinstance(delta, Content)]


class ConstrainedCallsParser(WrappedParser):
    """No text of the answer holds what begins a call, so where it was cut off after that, nothing
    of the call is content."""

    def __init__(self, parser: Parser, start_markers: Sequence[str]) -> None:
        super().__init__(parser)
        self._start_marker = re.compile(
            "|".join(rf"\n*{re.escape(one.strip())}" for one in start_markers)
        )

    def flush(self) -> list[AnswerDelta]:
        shown: list[AnswerDelta] = []
        for delta in super().flush():
            found = self._start_marker.search(delta.text) if isinstance(delta, Content) else None
            if found is not None:
                before = found.string[: found.start()]
                return [*shown, Content(before)] if before else shown
            shown.append(delta)
        return shown


class StructuredOrCallsParser(Parser):
    """The answer is structured output, or calls if it begins with a start marker of calls.
    Structured output may hold such markers anywhere else."""

    def __init__(self, calls: ToolParser) -> None:
        self.markers = calls.markers
        self.keeps_special_tokens = calls.keeps_special_tokens
        self._calls = calls
        self._start_markers = tuple({one.lstrip() for one in calls.start_markers})
        self._chosen: Parser | None = None
        self._space: list[str] = []
        self._held = ""
        """The beginning of a marker, behind the whitespace."""

    def push(self, text: str) -> list[AnswerDelta]:
        if self._chosen is None:
            self._choose(text)
            if self._chosen is None:
                return []
            text = self._take()
        deltas = self._chosen.push(text)
        self.rest = self._chosen.rest
        return deltas

    def flush(self) -> list[AnswerDelta]:
        if self._chosen is None:
            self._chosen = ContentParser()
        return [*self._chosen.push(self._take()), *self._chosen.flush()]

    def stop_at(self, marker: str) -> None:
        """Reasoning is no structured output."""
        self._chosen = self._calls
        self._calls.stop_at(marker)

    def _choose(self, text: str) -> None:
        if not self._held:
            end = end_of(SPACE, text, 0)
            self._space.append(text[:end])
            text = text[end:]
        self._held += text
        if self._held.startswith(self._start_markers):
            self._chosen = self._calls
        elif not any(one.startswith(self._held) for one in self._start_markers):
            self._chosen = ContentParser()

    def _take(self) -> str:
        held, self._held = "".join([*self._space, self._held]), ""
        self._space.clear()
        return held
