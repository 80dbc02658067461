"""Parsers of answers under a grammar, which say more certainly what an answer is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Content
from swell.cluster.text.parsers.tools import SPACE, ToolParser


class RequiredCallsParser(Parser):
    """The grammar asks for calls, so nothing is content: not the beginning of a call either, where
    the answer was cut off."""

    def __init__(self, parser: Parser) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser

    def push(self, text: str) -> list[AnswerDelta]:
        return _without_content(self._parser.push(text))

    def flush(self) -> list[AnswerDelta]:
        return _without_content(self._parser.flush())


def _without_content(parts: list[AnswerDelta]) -> list[AnswerDelta]:
    return [part for part in parts if not isinstance(part, Content)]


class ConstrainedCallsParser(Parser):
    """No text of the answer holds what begins a call, so where it was cut off behind that, nothing
    of the call is content."""

    def __init__(self, parser: Parser, start_markers: Sequence[str]) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser
        self._start_marker = re.compile(
            "|".join(rf"\n*{re.escape(one.strip())}" for one in start_markers)
        )

    def push(self, text: str) -> list[AnswerDelta]:
        return self._parser.push(text)

    def flush(self) -> list[AnswerDelta]:
        shown: list[AnswerDelta] = []
        for part in self._parser.flush():
            if not isinstance(part, Content) or not (found := self._start_marker.search(part.text)):
                shown.append(part)
                continue
            if found.start():
                shown.append(Content(part.text[: found.start()]))
            break
        return shown


class StructuredOrCallsParser(Parser):
    """The answer is a form or calls, as it begins with a marker of calls or not. A form may hold
    such markers anywhere else."""

    def __init__(self, calls: ToolParser) -> None:
        self.markers = calls.markers
        self.keeps_special_tokens = calls.keeps_special_tokens
        self._calls = calls
        self._start_markers = tuple({opener.lstrip() for opener in calls.start_markers})
        self._chosen: Parser | None = None
        self._space: list[str] = []
        self._held = ""
        """The beginning of a marker, behind the space."""

    def push(self, text: str) -> list[AnswerDelta]:
        if self._chosen is None:
            self._choose(text)
            if self._chosen is None:
                return []
            text = self._take()
        parts = self._chosen.push(text)
        self.rest = self._chosen.rest
        return parts

    def flush(self) -> list[AnswerDelta]:
        if self._chosen is None:
            self._chosen = ContentParser()
        return [*self._chosen.push(self._take()), *self._chosen.flush()]

    def until(self, marker: str) -> None:
        """Reasoning is no form."""
        self._chosen = self._calls
        self._calls.until(marker)

    def _choose(self, text: str) -> None:
        if not self._held:
            end = end_of(SPACE, text, 0)
            self._space.append(text[:end])
            text = text[end:]
        self._held += text
        if self._held.startswith(self._start_markers):
            self._chosen = self._calls
        elif not any(opener.startswith(self._held) for opener in self._start_markers):
            self._chosen = ContentParser()

    def _take(self) -> str:
        held, self._held = "".join([*self._space, self._held]), ""
        self._space.clear()
        return held
