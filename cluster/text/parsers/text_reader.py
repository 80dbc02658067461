"""Readers of a text that arrives in pieces: each character is read once."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from swell.cluster.text.parsers.marker_search import SPACE, LiteralMatcher, Matcher, end_of

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A coroutine that yields where the current piece of text ends, and continues with the next
piece."""


class NotRead(Exception):
    """The text does not continue with the expected part."""

    def __init__(self, unread: str = "") -> None:
        """`unread` is the last text that was read, if it must be read again as something else."""
        super().__init__()
        self.unread = unread


class TextReader(ABC):
    """Reads a call or a value. `take` returns the part of it that is certain."""

    ended = False
    """Whether it is complete, or cannot continue at the character where `read` stopped."""
    unread = ""
    """The text that was read last and does not belong to it; it precedes that character."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._reading = self._read()
        self._pieces: list[str] = []
        self._literals = LiteralMatcher()
        """The matcher of `_one_of`."""

    def read(self, text: str, at: int = 0) -> int:
        """Continues at `text[at:]` until it has `ended`, or the text has; returns where reading
        stopped."""
        self._text, self._at = text, at
        try:
            next(self._reading)
        except StopIteration:
            self.ended = True
        except NotRead as error:
            self.ended, self.unread = True, error.unread
        return self._at

    def take(self) -> str:
        """Returns the output since the last call."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def finish(self) -> None:
        """Marks the end of the text."""
        return

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads the parts in sequence, up to the end. Raises `NotRead`."""

    def _char(self) -> Reading[str]:
        """Returns the next character without reading past it."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _next(self) -> Reading[str]:
        """Returns the next character that is not whitespace, without reading past it."""
        return (yield from self._through(SPACE))

    def _through(
        self, pattern: re.Pattern[str], give: Callable[[str], None] | None = None
    ) -> Reading[str]:
        """Reads text that matches `pattern`, and passes it to `give` as it arrives; returns the
        character after it."""
        while True:
            text, start = self._text, self._at
            self._at = end = end_of(pattern, text, start)
            if give is not None and end > start:
                give(text[start:end])
            if end < len(text):
                return text[end]
            yield

    def _follow(
        self, reader: TextReader, give: Callable[[str], None] | None = None
    ) -> Reading[None]:
        """Lets `reader` read the text that follows; passes its output to `give` as it arrives."""
        while True:
            self._at = reader.read(self._text, self._at)
            if give is not None:
                give(reader.take())
            if reader.ended:
                return
            yield

    def _pass(self, char: str) -> Reading[None]:
        """Reads this character, after whitespace. Raises `NotRead` if another one follows."""
        if (yield from self._next()) != char:
            raise NotRead
        self._at += 1

    def _one_of(
        self,
        *literals: str,
        skip_space: bool = True,
        give: Callable[[str], None] | None = None,
    ) -> Reading[str]:
        """Reads one of these literals and returns it; passes the text to `give` as it arrives.
        Raises `NotRead` if other text follows."""
        self._literals = matcher = LiteralMatcher(*literals, skip_space=skip_space)
        while True:
            start = self._at
            found, possible, self._at = matcher.push(self._text, start)
            if give is not None:
                give(self._text[start : self._at])
            if found is not None:
                return found
            if not possible:
                raise NotRead(matcher.give_back())
            yield

    def _up_to(self, matcher: Matcher, give: Callable[[str], None]) -> Reading[str]:
        """Reads up to the end of a marker, and passes the text before it to `give` as it arrives;
        returns the marker."""
        while True:
            shown, marker, self._at = matcher.push(self._text, self._at)
            if shown:
                give(shown)
            if marker:
                return marker
            yield
