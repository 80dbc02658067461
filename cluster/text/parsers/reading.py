"""Readers of a text that comes in pieces: each character is read once."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from swell.cluster.text.parsers.matching import SPACE, LiteralMatcher, Matcher, end_of

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""Waits where a piece of the text ends, which is all that its `yield` means."""


class NotRead(Exception):
    """Other text follows than the one that was to be read here."""

    def __init__(self, unread: str = "") -> None:
        """`unread`: the last of what was read, if it is to be read again as something else."""
        super().__init__()
        self.unread = unread


class TextReader(ABC):
    """Reads a call or a value. `take` gives what of it is certain."""

    ended = False
    """It is whole, or cannot go on at the character where `read` stopped."""
    unread = ""
    """What was read last and does not belong to it: it precedes that character."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._reading = self._read()
        self._pieces: list[str] = []
        self._literals = LiteralMatcher()
        """The matcher of `_one_of`."""

    def read(self, text: str, at: int = 0) -> int:
        """Go on at `text[at:]` until it has `ended`, or the text has; where reading stopped."""
        self._text, self._at = text, at
        try:
            next(self._reading)
        except StopIteration:
            self.ended = True
        except NotRead as error:
            self.ended, self.unread = True, error.unread
        return self._at

    def take(self) -> str:
        """What it gives since the last call."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def finish(self) -> None:
        """Nothing follows."""
        return

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read one thing behind the other, up to the end. Raises `NotRead`."""

    def _char(self) -> Reading[str]:
        """The next character; it is still to be read."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _next(self) -> Reading[str]:
        """The next character that is no whitespace; it is still to be read."""
        return (yield from self._through(SPACE))

    def _through(
        self, pattern: re.Pattern[str], give: Callable[[str], None] | None = None
    ) -> Reading[str]:
        """Read what matches `pattern`, and `give` it as it comes; the character behind it."""
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
        """`reader` reads what follows; `give` what it gives as that comes."""
        while True:
            self._at = reader.read(self._text, self._at)
            if give is not None:
                give(reader.take())
            if reader.ended:
                return
            yield

    def _pass(self, char: str) -> Reading[None]:
        """This character follows, behind whitespace."""
        if (yield from self._next()) != char:
            raise NotRead
        self._at += 1

    def _one_of(
        self,
        *literals: str,
        skip_space: bool = True,
        give: Callable[[str], None] | None = None,
    ) -> Reading[str]:
        """One of these follows; which. `give` what is read as it comes."""
        self._literals = matcher = LiteralMatcher(*literals, skip_space=skip_space)
        while True:
            start = self._at
            found, possible, self._at = matcher.push(self._text, start)
            if give is not None:
                give(self._text[start : self._at])
            if found is not None:
                return found
            if not possible:
                unread, matcher.begun = matcher.begun, ""
                raise NotRead(unread)
            yield

    def _up_to(self, matcher: Matcher, give: Callable[[str], None]) -> Reading[str]:
        """Read up to the end of a marker, and `give` what precedes it as it comes; the marker."""
        while True:
            shown, marker, self._at = matcher.push(self._text, self._at)
            if shown:
                give(shown)
            if marker:
                return marker
            yield
