"""Values that are not written as JSON, read while they are written and given as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.json_values import EscapedString, ScalarValue, Value
from swell.cluster.text.parsers.values import json_escaped

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_PARTS = {
    "begin": {"+": "sign", "-": "sign", "0": "zero", "9": "digits", ".": "point"},
    "sign": {"0": "zero", "9": "digits", ".": "point"},
    "zero": {"0": "digits", "9": "digits", ".": "point", "e": "e", "x": "hex"},
    "digits": {"0": "digits", "9": "digits", ".": "point", "e": "e"},
    "point": {"0": "point", "9": "point", "e": "e"},
    "e": {"+": "exponent", "-": "exponent", "0": "exponent", "9": "exponent"},
    "exponent": {"0": "exponent", "9": "exponent"},
    "hex": {"0": "hex", "9": "hex"},
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_ESCAPES |= {"\\": "\\", "/": "/", "'": "'", '"': '"', "\n": ""}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


class QuotedString(EscapedString):
    """Between quotes as Python and JSON have them, from the first quote on."""

    _escapes = _ESCAPES
    _code_digits = _CODE_DIGITS

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._plain = re.compile(f"[^{quote}\\\\]*")
        self._quotes = 0
        """In a row, that may begin or end the string."""
        self._quotes_needed = 0
        """One or three; 0 where the string begins."""

    def _push_plain(self, text: str, at: int) -> int:
        if text[at] == self._quote:
            self._quotes += 1
            if not self._quotes_needed:
                if self._quotes == 1:
                    self._pieces.append('"')
                elif self._quotes == 3:
                    self._quotes, self._quotes_needed = 0, 3
            elif self._quotes == self._quotes_needed:
                self._end()
            return at + 1
        if not self._quotes_needed:
            if self._quotes == 2:
                self._end()
                return at
            self._quotes, self._quotes_needed = 0, 1
        if self._quotes:
            self._pieces.append(json_escaped(self._quote * self._quotes))
            self._quotes = 0
        end = end_of(self._plain, text, at)
        self._pieces.append(json_escaped(text[at:end]))
        if end < len(text) and text[end] == "\\":
            self._escape = "\\"
            return end + 1
        return end

    def _show(self, text: str) -> None:
        self._pieces.append(json_escaped(text))

    def _show_code(self, code: int, escape: str) -> None:
        """Two escaped code units of UTF-16 may be one character: JSON writes them alike."""
        if 0xD800 <= code < 0xE000:
            self._pieces.append(f"\\u{code:04x}")
        else:
            self._show(chr(code) if code < 0x110000 else escape)

    def _end(self) -> None:
        self._pieces.append('"')
        self.done = True

    def flush(self) -> None:
        if not self._quotes_needed and self._quotes == 2:
            self._end()
        elif self._quotes_needed:
            self._pieces.append(json_escaped(self._quote * self._quotes))
            self._quotes = 0


class DelimitedString(Value):
    """Between two equal marks, without escapes, from after the first on."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._matcher = Matcher(mark)
        self._pieces.append('"')

    def push(self, text: str, at: int) -> int:
        shown, found, at = self._matcher.push(text, at)
        self._pieces.append(json_escaped(shown))
        if found:
            self._pieces.append('"')
            self.done = True
        return at

    def flush(self) -> None:
        self._pieces.append(json_escaped(self._matcher.flush()))


class BareScalar(ScalarValue):
    """A number, a word of the notation, or another word, which is a string: from the character on
    that makes it one. The others are known when they end, at a character that is of no word."""

    _chars = re.compile(r"[-+.$\w]*")

    def __init__(self, words: Mapping[str, str]) -> None:
        super().__init__()
        self._words = words
        self._word = ""
        """The beginning of one of the words; empty: it is none."""
        self._number = "begin"
        """What of a number was read last; empty: it is none."""
        self._held: list[str] = []
        self._is_string = False

    def push(self, text: str, at: int) -> int:
        end = end_of(self._chars, text, at)
        while at < end and not self._is_string:
            self._push_char(text[at])
            at += 1
        if self._is_string:
            self._pieces.append(json_escaped(text[at:end]))
        self.done = end < len(text)
        if self.done:
            self.flush()
            if self._is_string:
                self._pieces.append('"')
        return end

    def _push_char(self, char: str) -> None:
        word = self._word + char
        whole = len(word) == len(self._held) + 1 and any(w.startswith(word) for w in self._words)
        self._word = word if whole else ""
        kind = "0" if char == "0" else "9" if char in "_123456789" else char.lower()
        if self._number == "hex" and kind in "abcdef":
            kind = "9"
        self._number = _NUMBER_PARTS.get(self._number, {}).get(kind, "")
        self._held.append(char)
        if not self._word and not self._number:
            self._begin_string()

    def _begin_string(self) -> None:
        self._is_string = True
        self._pieces.append('"' + json_escaped("".join(self._held)))
        self._held.clear()

    def flush(self) -> None:
        if self._is_string:
            return
        word = "".join(self._held)
        value = self._words.get(word) or (as_json_number(word) if self._number else "")
        if value:
            self._pieces.append(value)
        else:
            self._begin_string()


class BareKey(BareScalar):
    """A key: a string, whatever the word would be as a value."""

    def __init__(self) -> None:
        super().__init__({})
        self._begin_string()


def as_json_number(word: str) -> str:
    """The number as JSON writes it; empty: it is none."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        return json.dumps(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    return json.dumps(number) if math.isfinite(number) else ""
