"""One call of a tool, read while it is written."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_NAME_CHARS = 256
"""Of a tool or an argument; what is longer is no name. OpenAI's API allows 64."""

_SPACE = re.compile(r"[ \t\r\n]*")


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run that matches `pattern`, possibly empty, ends."""
    found = pattern.match(text, at)
    assert found is not None, f"{pattern.pattern} must match the empty text"
    return found.end()


class Call:
    """A format reads the call's name first, then its arguments as JSON text."""

    name = ""
    id = ""
    """The one that the model gave; empty: none."""
    known = False
    """It is a call, whatever follows. `take` gives its arguments from then on."""
    ended = False
    """It is whole, or cannot go on at the character where `push` stopped."""
    unread = ""
    """What was read last and is no part of the call: it stands before that character."""

    _state: Callable[[str, int], int]

    def push(self, text: str, at: int) -> int:
        """Read from `text[at:]` to the end of the call or of the text; where reading stopped."""
        while at < len(text) and not self.ended:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The arguments' text since the last call; only once the call is known."""
        raise NotImplementedError

    def flush(self) -> None:
        """Nothing follows."""


class LiteralMatcher:
    """Finds which of some texts stands at a place, behind whitespace; none begins another."""

    def __init__(self, *literals: str) -> None:
        self._literals = literals
        self.begun = ""
        """The beginning of one."""

    def push(self, text: str, at: int) -> tuple[str | None, bool, int]:
        """The text that is found, whether one may still be, and where reading stopped."""
        if not self.begun:
            at = end_of(_SPACE, text, at)
        while at < len(text):
            begun = self.begun + text[at]
            if begun in self._literals:
                self.begun = ""
                return begun, True, at + 1
            if not any(one.startswith(begun) for one in self._literals):
                return None, False, at
            self.begun = begun
            at += 1
        return None, True, at


class MarkedCall(Call):
    """A call between texts that its format fixes: states read those, or a run of characters."""

    def __init__(self) -> None:
        self._literals = LiteralMatcher()
        self._then: dict[str, Callable[[str], None]] = {}
        self._run = ""
        self._pattern = _SPACE
        self._after_run: Callable[[str], None]
        self._state = self._at_literal

    def _expect(self, then: dict[str, Callable[[str], None]]) -> None:
        """One of these texts follows, behind whitespace; what is to be done with it."""
        self._then = then
        self._literals = LiteralMatcher(*then)
        self._state = self._at_literal

    def _at_literal(self, text: str, at: int) -> int:
        found, possible, at = self._literals.push(text, at)
        if found is not None:
            self._then[found](found)
        elif not possible:
            self._break(self._literals.begun)
        return at

    def _read_run(self, pattern: re.Pattern[str], then: Callable[[str], None]) -> None:
        """A name follows, behind whitespace: characters of `pattern`, one at least. It matches
        `MAX_NAME_CHARS` + 1 at most at a time."""
        self._run, self._pattern, self._after_run = "", pattern, then
        self._state = self._before_run

    def _before_run(self, text: str, at: int) -> int:
        at = end_of(_SPACE, text, at)
        if at < len(text):
            self._state = self._in_run
        return at

    def _in_run(self, text: str, at: int) -> int:
        end = end_of(self._pattern, text, at)
        self._run += text[at:end]
        if len(self._run) > MAX_NAME_CHARS or (end < len(text) and not self._run):
            self._break(self._run if self.known else "")
        elif end < len(text):
            self._after_run(self._run)
        return end

    def _break(self, unread: str) -> None:
        self.unread = unread
        self.ended = True
