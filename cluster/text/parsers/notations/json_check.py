"""Checks at each character whether a text that is still being written may become one JSON value."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.notations.structure import StructureReader
from swell.cluster.text.parsers.text_reader import NotRead, Reading

JSON_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{0,4}')
"""A valid escape, or the beginning of one, after the backslash."""
_FIRST = {"{": "object", "[": "array", '"': "string", "-": "number", "t": "boolean", "f": "boolean"}
_FIRST |= {"n": "null", "T": "boolean", "F": "boolean", "N": "null"}
_FIRST |= dict.fromkeys("0123456789", "number")
_WORDS = ("true", "false", "null")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Values in Python's notation, which chat templates of some models print; only a whole value may be
one."""

_DIGITS = {"0": "0", **dict.fromkeys("123456789", "9"), "E": "e"}
_NUMBER = {
    "": {"-": "-", "0": "zero", "9": "int"},
    "-": {"0": "zero", "9": "int"},
    "zero": {".": "point", "e": "e"},
    "int": {"0": "int", "9": "int", ".": "point", "e": "e"},
    "point": {"0": "fraction", "9": "fraction"},
    "fraction": {"0": "fraction", "9": "fraction", "e": "e"},
    "e": {"+": "sign", "-": "sign", "0": "exponent", "9": "exponent"},
    "sign": {"0": "exponent", "9": "exponent"},
    "exponent": {"0": "exponent", "9": "exponent"},
}
_NUMBER_ENDS = frozenset(("zero", "int", "fraction", "exponent"))


class JsonChecker(StructureReader):
    """Reads one value of the given types, with whitespace around it. `ended` means that no
    continuation is such a value."""

    def __init__(self, types: frozenset[str] = JSON_TYPES) -> None:
        super().__init__()
        self.in_string = False
        """Whether the next character is in a string within an array or object."""
        self._types = types
        self._whole = False

    @property
    def whole(self) -> bool:
        """Whether the text so far is a value."""
        return self._whole and not self.ended

    def _read(self) -> Reading[None]:
        yield from super()._read()
        self._whole = True
        yield from self._token()
        raise NotRead

    def _opened_by(self, char: str) -> tuple[str, str] | None:
        kind = _FIRST.get(char)
        if kind is None or (not self._open and kind not in self._types):
            raise NotRead
        return {"object": ("}", ":"), "array": ("]", "")}.get(kind)

    def _read_scalar(self, char: str, *, is_key: bool) -> Reading[None]:
        kind = _FIRST.get(char)
        if kind == "string":
            self._at += 1
            yield from self._read_string()
        elif is_key:
            raise NotRead
        elif kind == "number":
            yield from self._read_number(char)
        else:
            yield from self._read_word()

    def _read_string(self) -> Reading[None]:
        while True:
            self.in_string = bool(self._open)
            char = yield from self._through(_IN_STRING)
            self.in_string = False
            if char != "\\":
                break
            self._at += 1
            escape = yield from self._char()
            while _ESCAPE.fullmatch(escape):
                self._at += 1
                if escape[0] != "u" or len(escape) == 5:
                    break
                escape += yield from self._char()
            else:
                raise NotRead
        if char != '"':
            raise NotRead
        self._at += 1

    def _read_number(self, char: str) -> Reading[None]:
        part = ""
        while step := _NUMBER[part].get(_DIGITS.get(char, char)):
            part = step
            self._at += 1
            self._whole = not self._open and part in _NUMBER_ENDS
            char = yield from self._char()
        if part not in _NUMBER_ENDS:
            raise NotRead

    def _read_word(self) -> Reading[None]:
        words = _WORDS if self._open else (*_WORDS, *PYTHON_WORDS)
        yield from self._one_of(*words)
