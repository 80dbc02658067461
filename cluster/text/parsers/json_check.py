"""Whether a text that is still being written may become one JSON value, decided at each
character."""

from __future__ import annotations

import re
from collections.abc import Callable

from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.structure import StructureReader

JSON_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{0,4}')
"""One, or the beginning of one, behind the backslash."""
_FIRST = {"{": "object", "[": "array", '"': "string", "-": "number", "t": "boolean", "f": "boolean"}
_FIRST |= {"n": "null", "T": "boolean", "F": "boolean", "N": "null"}
_FIRST |= dict.fromkeys("0123456789", "number")
_WORDS = ("true", "false", "null")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Chat templates of some models print values as Python does; only a whole value may be one."""

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
    """Reads one value, with whitespace around it."""

    def __init__(self, types: frozenset[str] = JSON_TYPES) -> None:
        super().__init__()
        self.broken = False
        """No continuation is a value of one of the `types`."""
        self._types = types
        self._after_string: Callable[[str, int], int] = self._after_value
        self._part = ""
        """Of a number: what it ends with. Of a word or an escape: its characters so far."""

    @property
    def whole(self) -> bool:
        """The text so far is a value."""
        if self.broken or self._open:
            return False
        in_number = self._state == self._in_number and self._part in _NUMBER_ENDS
        return in_number or self._state == self._after_value

    @property
    def in_string(self) -> bool:
        """The next character is in a string within an array or object."""
        return bool(self._open) and self._state == self._in_string

    def push(self, text: str) -> None:
        at = 0
        while at < len(text) and not self.broken:
            at = self._state(text, at)

    def _stop(self, at: int) -> int:
        self.broken = True
        return at

    def _begin(self, char: str, at: int, *, is_key: bool) -> int:
        kind = _FIRST.get(char)
        if kind is None or (not self._open and kind not in self._types):
            return self._stop(at)
        if kind == "string":
            self._after_string = self._before_separator if is_key else self._after_value
            self._state = self._in_string
            return at + 1
        if is_key:
            return self._stop(at)
        if kind == "object" or kind == "array":
            return self._nest("}", ":", at) if kind == "object" else self._nest("]", "", at)
        self._part = ""
        self._state = self._in_number if kind == "number" else self._in_word
        return at

    def _in_string(self, text: str, at: int) -> int:
        at = end_of(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] not in '"\\':
            return self._stop(at)
        self._part = ""
        self._state = self._after_string if text[at] == '"' else self._in_escape
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        self._part += text[at]
        if not _ESCAPE.fullmatch(self._part):
            return self._stop(at)
        if self._part[0] != "u" or len(self._part) == 5:
            self._state = self._in_string
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        step = _NUMBER[self._part].get(_DIGITS.get(text[at], text[at]))
        if step is not None:
            self._part = step
            return at + 1
        if self._part not in _NUMBER_ENDS:
            return self._stop(at)
        self._state = self._after_value
        return at

    def _in_word(self, text: str, at: int) -> int:
        self._part += text[at]
        words = _WORDS if self._open else (*_WORDS, *PYTHON_WORDS)
        if self._part in words:
            self._state = self._after_value
        elif not any(word.startswith(self._part) for word in words):
            return self._stop(at)
        return at + 1
