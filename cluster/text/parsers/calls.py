"""One call of a tool, read while it is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

MAX_NAME_CHARS = 256
"""Of a tool or an argument; what is longer is no name. OpenAI's API allows 64."""

SPACE = re.compile(r"[ \t\r\n]*")

_Reader = TypeVar("_Reader")


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run that matches `pattern`, possibly empty, ends."""
    found = pattern.match(text, at)
    assert found is not None, f"{pattern.pattern} must match the empty text"
    return found.end()


def behind_space(state: Callable[[_Reader, str, int], int]) -> Callable[[_Reader, str, int], int]:
    """A state that reads from the next character on that is no whitespace."""

    def read(self: _Reader, text: str, at: int) -> int:
        at = end_of(SPACE, text, at)
        return state(self, text, at) if at < len(text) else at

    return read


class Call:
    """A format reads the call's name first, then its arguments as JSON text."""

    name = ""
    id = ""
    """The id that the model wrote; empty: none."""
    known = False
    """It is a call, whatever follows. `take` gives its arguments from then on."""
    ended = False
    """It is whole, or cannot go on at the character where `push` stopped."""
    unread = ""
    """What was read last and does not belong to the call: it precedes that character."""
    body: Call | None = None
    """What reads the rest of the call, where this one has read its head and `ended`."""

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
    """Finds which of some literals the text has here, behind whitespace if `skip_space`. None of
    them begins another."""

    def __init__(self, *literals: str, skip_space: bool = True) -> None:
        self._literals = literals
        self._skip_space = skip_space
        self.begun = ""
        """The beginning of one."""

    def push(self, text: str, at: int) -> tuple[str | None, bool, int]:
        """The literal that is found, whether one may still be, and where reading stopped."""
        begun = self.begun
        if not begun and self._skip_space:
            at = end_of(SPACE, text, at)
        if at == len(text):
            return None, True, at
        for literal in self._literals:
            missing = len(literal) - len(begun)
            longer = begun + text[at : at + missing]
            if longer == literal:
                self.begun = ""
                return literal, True, at + missing
            if literal.startswith(longer):
                self.begun = longer
                return None, True, len(text)
        while any(literal.startswith(begun + text[at]) for literal in self._literals):
            begun += text[at]
            at += 1
        self.begun = begun
        return None, False, at


class MarkedCall(Call):
    """A call between literals that its format fixes: states read those, or a run of characters."""

    _literals: LiteralMatcher
    _then: dict[str, Callable[[str], None]]
    _run: str
    _pattern: re.Pattern[str]
    _max_chars: int
    _after_run: Callable[[str], None]

    def _expect(self, then: dict[str, Callable[[str], None]], *, skip_space: bool = True) -> None:
        """One of these literals follows; what to do with it."""
        self._then = then
        self._literals = LiteralMatcher(*then, skip_space=skip_space)
        self._state = self._at_literal

    def _at_literal(self, text: str, at: int) -> int:
        found, possible, at = self._literals.push(text, at)
        if found is not None:
            self._then[found](found)
        elif not possible:
            self._break(self._literals.begun)
        return at

    def _read_run(
        self,
        pattern: re.Pattern[str],
        then: Callable[[str], None],
        *,
        max_chars: int = MAX_NAME_CHARS,
        skip_space: bool = True,
    ) -> None:
        """A name follows: characters of `pattern`, at least one and at most `max_chars`."""
        self._run, self._pattern, self._after_run = "", pattern, then
        self._max_chars = max_chars
        self._state = self._before_run if skip_space else self._in_run

    @behind_space
    def _before_run(self, text: str, at: int) -> int:
        self._state = self._in_run
        return at

    def _in_run(self, text: str, at: int) -> int:
        end = end_of(self._pattern, text, at)
        self._run += text[at:end]
        if len(self._run) > self._max_chars or (end < len(text) and not self._run):
            self._break(self._run if self.known else "")
        elif end < len(text):
            self._after_run(self._run)
        return end

    def _begin_body(self, body: Call) -> None:
        self.body = body
        self.ended = True

    def _break(self, unread: str) -> None:
        """It is no call, or its rest cannot be read."""
        self.unread = unread
        self.ended = True
