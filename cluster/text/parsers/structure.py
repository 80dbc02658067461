"""Arrays and objects, read while they are written in one pass."""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.matching import SPACE
from swell.cluster.text.parsers.reading import NotRead, Reading, TextReader


class StructureReader(TextReader):
    """Reads brackets, commas and what separates keys from values. A subclass reads the rest."""

    _allows_last_comma = False
    """A comma may precede a closing bracket."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []
        """For each open array and object: what closes it, and what separates key and value;
        empty for arrays."""

    # ---------------------------------------------------------------------------- a subclass

    def _on_token(self, text: str) -> None:
        """A token of structure was read; this is how JSON writes it."""

    def _on_space(self, text: str) -> None:
        """Whitespace was read."""

    def _on_value(self) -> None:
        """A value is whole."""

    @abstractmethod
    def _opened_by(self, char: str) -> tuple[str, str] | None:
        """As in `_open`, of what this character opens; None: it opens neither array nor object."""

    @abstractmethod
    def _read_scalar(self, char: str, *, is_key: bool) -> Reading[None]:
        """A key or a value that begins with `char`."""

    # --------------------------------------------------------------------------------- reading

    def _read(self) -> Reading[None]:
        """One value, or the rest of what is open."""
        may_close = bool(self._open)
        while True:
            char = yield from self._token()
            closer, separator = self._open[-1] if self._open else ("", "")
            if may_close and char == closer:
                self._close()
            else:
                if separator:
                    char = yield from self._read_key(char, separator)
                if may_close := self._nest(char):
                    continue
                yield from self._read_scalar(char, is_key=False)
                self._on_value()
            while self._open and (yield from self._token()) == self._open[-1][0]:
                self._close()
            if not self._open:
                return
            if self._text[self._at] != ",":
                raise NotRead
            self._take_token(",")
            may_close = self._allows_last_comma

    def _token(self) -> Reading[str]:
        return (yield from self._through(SPACE, self._on_space))

    def _read_key(self, char: str, separator: str) -> Reading[str]:
        """A key and what separates it from its value; that one's first character."""
        yield from self._read_scalar(char, is_key=True)
        if (yield from self._token()) != separator:
            raise NotRead
        self._take_token(":")
        return (yield from self._token())

    def _nest(self, char: str) -> bool:
        """Whether an array or object begins."""
        opened = self._opened_by(char)
        if opened is None:
            return False
        self._open.append(opened)
        self._take_token("{" if opened[1] else "[")
        return True

    def _close(self) -> None:
        _, separator = self._open.pop()
        self._take_token("}" if separator else "]")
        self._on_value()

    def _take_token(self, token: str) -> None:
        self._at += 1
        self._on_token(token)
