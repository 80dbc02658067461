"""Parsers of answers that follow a grammar, which makes more of an answer certain."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.text.parsers.base import AnswerReader, ContentParser, Parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.parsers.tool_parser import ToolParser


class WrappedParser(Parser):
    """Wraps another parser and drops some of its deltas."""

    def __init__(self, parser: Parser) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser

    def push(self, text: str) -> list[AnswerDelta]:
        return self._parser.push(text)

    def flush(self) -> list[AnswerDelta]:
        return self._parser.flush()


class RequiredCallsParser(WrappedParser):
    """Parser of an answer whose grammar requires calls. So no text is content, not even the
    beginning of a call where the answer was cut off."""

    def push(self, text: str) -> list[AnswerDelta]:
        return [delta for delta in super().push(text) if not isinstance(delta, Content)]

    def flush(self) -> list[AnswerDelta]:
        return [delta for delta in super().flush() if not isinstance(delta, Content)]


class ConstrainedCallsParser(WrappedParser):
    """Parser of an answer whose grammar allows start markers of calls only in calls. So if the
    answer was cut off after such a marker, no part of the call is content."""

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


class StructuredOrCallsParser(AnswerReader):
    """Parser of an answer that is structured output, or calls if it begins with a start marker of
    calls. Structured output may contain such markers anywhere else."""

    def __init__(self, calls: ToolParser) -> None:
        super().__init__()
        self.markers = calls.markers
        self.keeps_special_tokens = calls.keeps_special_tokens
        self._calls = calls
        self._chosen: Parser | None = None

    def push(self, text: str) -> list[AnswerDelta]:
        deltas = super().push(text)
        self.rest = self._chosen.rest if self._chosen is not None else None
        return deltas

    def flush(self) -> list[AnswerDelta]:
        if self._chosen is None:
            self.push("")
            self._reading.throw(NotRead())
        assert self._chosen is not None, "the beginning of the answer decides"
        return [*self._take_deltas(), *self._chosen.flush()]

    def stop_at(self, marker: str) -> None:
        """Parses the text that follows as reasoning, which is never structured output."""
        self._chosen = self._calls
        self._calls.stop_at(marker)

    def _read(self) -> Reading[None]:
        if self._chosen is None:
            held: list[str] = []
            markers = {one.lstrip() for one in self._calls.start_markers}
            try:
                yield from self._one_of(*markers, give=held.append)
                self._chosen = self._calls
            except NotRead:
                self._chosen = ContentParser()
            self._unread("".join(held))
        yield from self._pass_on(self._chosen)
