"""Arrays and objects, read while they are written in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from swell.cluster.text.parsers.calls import SPACE, end_of

_Reader = TypeVar("_Reader", bound="StructureReader")


def _token(state: Callable[[_Reader, str, int], int]) -> Callable[[_Reader, str, int], int]:
    """A state that reads the next character that is no whitespace, which is at an index."""

    def read(self: _Reader, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        if end > at:
            self._on_space(text[at:end])
        return state(self, text[end], end) if end < len(text) else end

    return read


class StructureReader:
    """Reads brackets, commas and what separates keys from values. A subclass reads the rest."""

    _allows_last_comma = False
    """A comma may precede a closing bracket."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        """Of each array and object that is open: what closes it, and what separates key and value;
        empty for arrays."""
        self._state: Callable[[str, int], int] = self._before_value

    # ---------------------------------------------------------------------------- a subclass

    def _on_token(self, text: str) -> None:
        """A token of structure was read; this is how JSON writes it."""

    def _on_space(self, text: str) -> None:
        """Whitespace was read."""

    def _begin(self, char: str, at: int, *, is_key: bool) -> int:
        """A key or a value begins at `at`: `_nest`, or set the state that reads it."""
        raise NotImplementedError

    def _end_value(self) -> None:
        self._state = self._after_value

    def _stop(self, at: int) -> int:
        """The character at `at` cannot follow."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------- states

    @_token
    def _before_value(self, char: str, at: int) -> int:
        return self._begin(char, at, is_key=False)

    @_token
    def _before_key(self, char: str, at: int) -> int:
        return self._begin(char, at, is_key=True)

    @_token
    def _before_first(self, char: str, at: int) -> int:
        closer, separator = self._open[-1]
        return self._close(at) if char == closer else self._begin(char, at, is_key=bool(separator))

    @_token
    def _before_separator(self, char: str, at: int) -> int:
        if char != self._open[-1][1]:
            return self._stop(at)
        self._on_token(":")
        self._state = self._before_value
        return at + 1

    @_token
    def _after_value(self, char: str, at: int) -> int:
        closer, separator = self._open[-1] if self._open else ("", "")
        if char == closer:
            return self._close(at)
        if not closer or char != ",":
            return self._stop(at)
        self._on_token(",")
        behind = self._before_key if separator else self._before_value
        self._state = self._before_first if self._allows_last_comma else behind
        return at + 1

    def _nest(self, closer: str, separator: str, at: int) -> int:
        self._on_token("{" if separator else "[")
        self._open.append((closer, separator))
        self._state = self._before_first
        return at + 1

    def _close(self, at: int) -> int:
        _, separator = self._open.pop()
        self._on_token("}" if separator else "]")
        self._end_value()
        return at + 1
