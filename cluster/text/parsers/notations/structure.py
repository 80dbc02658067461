"""Reader of arrays and objects while they stream, in one pass."""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.marker_search import SPACE
from swell.cluster.text.parsers.text_reader import NotRead, Reading, TextReader


class StructureReader(TextReader):
    """Reads brackets, commas and separators of keys and values. A subclass reads the rest."""

    _allows_last_comma = False
    """Whether a comma may precede a closing bracket."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []
        """The bracket that closes each open array or object, and the separator of key and value,
        which is empty for arrays."""

    # ------------------------------------------------------------------- hooks of subclasses

    def _on_token(self, text: str) -> None:
        """Called when a structural token was read; `text` is its JSON form."""

    def _on_space(self, text: str) -> None:
        """Called when whitespace was read."""

    def _on_value(self) -> None:
        """Called when a value is complete."""

    @abstractmethod
    def _opened_by(self, char: str) -> tuple[str, str] | None:
        """Returns the entry in `_open` for the array or object that this character opens; None if
        it opens neither."""

    @abstractmethod
    def _read_scalar(self, char: str, *, is_key: bool) -> Reading[None]:
        """Reads a key or a value that begins with `char`."""

    # --------------------------------------------------------------------------------- reading

    def _read(self) -> Reading[None]:
        """Reads one value, or the rest of the open arrays and objects."""
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
        """Reads a key and the separator after it; returns the first character of its value."""
        yield from self._read_scalar(char, is_key=True)
        if (yield from self._token()) != separator:
            raise NotRead
        self._take_token(":")
        return (yield from self._token())

    def _nest(self, char: str) -> bool:
        """Begins an array or object if `char` opens one; returns whether it does."""
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
