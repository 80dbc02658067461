"""Whether a text that is still being written may become one JSON value: decided at each character,
as RFC 8259 has it, in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable

from swell.cluster.text.parsers.calls import behind_space, end_of

JSON_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
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


class JsonChecker:
    """Reads one value, with whitespace around it."""

    def __init__(self, types: frozenset[str] = JSON_TYPES) -> None:
        self.broken = False
        """No continuation is a value of one of the `types`."""
        self._types = types
        self._closers: list[str] = []
        """Of the arrays and objects that are open."""
        self._state: Callable[[str, int], int] = self._before_value
        self._after_string: Callable[[str, int], int] = self._after_value
        self._part = ""
        """Of a number: what it ends with. Of a word: its characters so far."""
        self._hex_digits = 0

    @property
    def whole(self) -> bool:
        """The text so far is a value."""
        if self.broken or self._closers:
            return False
        in_number = self._state == self._in_number and self._part in _NUMBER_ENDS
        return in_number or self._state == self._after_value

    @property
    def in_string(self) -> bool:
        """The next character stands in a string within an array or object."""
        return bool(self._closers) and self._state == self._in_string

    def push(self, text: str) -> None:
        at = 0
        while at < len(text) and not self.broken:
            at = self._state(text, at)

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    # ------------------------------------------------------------------------- between values

    @behind_space
    def _before_value(self, text: str, at: int) -> int:
        char = text[at]
        kind = _FIRST.get(char)
        if kind is None or (not self._closers and kind not in self._types):
            return self._break(at)
        if kind == "object" or kind == "array":
            self._closers.append("}" if kind == "object" else "]")
            self._state = self._first_key if kind == "object" else self._first_item
            return at + 1
        if kind == "string":
            return self._begin_string(self._after_value, at)
        self._part = ""
        self._state = self._in_number if kind == "number" else self._in_word
        return at

    @behind_space
    def _first_item(self, text: str, at: int) -> int:
        self._state = self._after_value if text[at] == "]" else self._before_value
        return at

    @behind_space
    def _first_key(self, text: str, at: int) -> int:
        self._state = self._after_value if text[at] == "}" else self._before_key
        return at

    @behind_space
    def _before_key(self, text: str, at: int) -> int:
        return self._begin_string(self._before_colon, at) if text[at] == '"' else self._break(at)

    @behind_space
    def _before_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._break(at)
        self._state = self._before_value
        return at + 1

    @behind_space
    def _after_value(self, text: str, at: int) -> int:
        closer = self._closers[-1] if self._closers else ""
        if closer and text[at] == closer:
            self._closers.pop()
        elif closer and text[at] == ",":
            self._state = self._before_value if closer == "]" else self._before_key
        else:
            return self._break(at)
        return at + 1

    # -------------------------------------------------------------------------------- scalars

    def _begin_string(self, behind: Callable[[str, int], int], at: int) -> int:
        self._after_string = behind
        self._state = self._in_string
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        at = end_of(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] not in '"\\':
            return self._break(at)
        self._state = self._after_string if text[at] == '"' else self._in_escape
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_digits = 4
            self._state = self._in_hex
        elif text[at] in _ESCAPES:
            self._state = self._in_string
        else:
            return self._break(at)
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._break(at)
        self._hex_digits -= 1
        if not self._hex_digits:
            self._state = self._in_string
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        step = _NUMBER[self._part].get(_DIGITS.get(text[at], text[at]))
        if step is not None:
            self._part = step
            return at + 1
        if self._part not in _NUMBER_ENDS:
            return self._break(at)
        self._state = self._after_value
        return at

    def _in_word(self, text: str, at: int) -> int:
        self._part += text[at]
        words = _WORDS if self._closers else (*_WORDS, *PYTHON_WORDS)
        if self._part in words:
            self._state = self._after_value
        elif not any(word.startswith(self._part) for word in words):
            return self._break(at)
        return at + 1
