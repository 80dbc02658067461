"""Parsers of answers under a grammar, which say more certainly what an answer is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.parsers.base import ContentParser, Parser
from swell.cluster.parsers.parts import Content, Part
from swell.cluster.parsers.tools import SPACE, ToolParser


class CallsOnly(Parser):
    """The grammar asks for calls, so nothing is content: not the beginning of a call either, where
    the answer was cut off."""

    def __init__(self, parser: Parser) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        return _without_content(self._parser.push(text))

    def flush(self) -> list[Part]:
        return _without_content(self._parser.flush())


def _without_content(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not isinstance(part, Content)]


class HeldCalls(Parser):
    """No text of the answer holds what begins a call, so where it was cut off behind that, nothing
    of the call is content."""

    def __init__(self, parser: Parser, openers: Sequence[str]) -> None:
        self.markers = parser.markers
        self.keeps_special_tokens = parser.keeps_special_tokens
        self._parser = parser
        self._opener = re.compile("|".join(rf"\n*{re.escape(one.strip())}" for one in openers))

    def push(self, text: str) -> list[Part]:
        return self._parser.push(text)

    def flush(self) -> list[Part]:
        shown: list[Part] = []
        for part in self._parser.flush():
            found = self._opener.search(part.text) if isinstance(part, Content) else None
            if found is None:
                shown.append(part)
                continue
            if found.start():
                shown.append(Content(part.text[: found.start()]))
            break
        return shown


class FormOrCalls(Parser):
    """The answer is a form or calls, as it begins with a marker of calls or not. A form may hold
    such markers anywhere else."""

    def __init__(self, calls: ToolParser) -> None:
        self.markers = calls.markers
        self.keeps_special_tokens = calls.keeps_special_tokens
        self._calls = calls
        self._openers = tuple({opener.lstrip() for opener in calls.openers})
        self._chosen: Parser | None = None
        self._held = ""

    def push(self, text: str) -> list[Part]:
        if self._chosen is None:
            self._held += text
            self._choose()
            if self._chosen is None:
                return []
            text, self._held = self._held, ""
        parts = self._chosen.push(text)
        self.rest = self._chosen.rest
        return parts

    def flush(self) -> list[Part]:
        if self._chosen is None:
            self._chosen = ContentParser()
        held, self._held = self._held, ""
        return [*self._chosen.push(held), *self._chosen.flush()]

    def until(self, marker: str) -> None:
        """Reasoning is no form."""
        self._chosen = self._calls
        self._calls.until(marker)

    def _choose(self) -> None:
        found = SPACE.match(self._held)
        begun = self._held[found.end() if found else 0 :]
        if begun.startswith(self._openers):
            self._chosen = self._calls
        elif not any(opener.startswith(begun) for opener in self._openers):
            self._chosen = ContentParser()
