"""Readers of values that are not JSON, which output them as JSON while they stream."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from swell.cluster.text.parsers.marker_search import Matcher
from swell.cluster.text.parsers.notations.json_values import EscapedString, ScalarValue
from swell.cluster.text.parsers.notations.typed_text import json_escaped
from swell.cluster.text.parsers.text_reader import Reading, TextReader

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
    """A string in quotes as in Python and JSON, from the first quote on."""

    _escapes = _ESCAPES
    _code_digits = _CODE_DIGITS

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._plain = re.compile(f"[^{quote}\\\\]*")
        self._is_open = False
        """Whether the opening quotes were read."""
        self._quotes = 0
        """Number of quotes in a row that may begin or end the string."""

    def finish(self) -> None:
        if self._is_open:
            self._show(self._quote * self._quotes)
        elif self._quotes == 2:
            self._pieces.append('"')

    def _read(self) -> Reading[None]:
        self._pieces.append('"')
        around = yield from self._read_quotes(3)
        self._is_open = around != 2
        quotes = 0 if self._is_open else around
        while quotes < around:
            self._show(self._quote * quotes)
            if (yield from self._through(self._plain, self._show)) == "\\":
                yield from self._read_escape()
            quotes = yield from self._read_quotes(around)
        self._pieces.append('"')

    def _read_quotes(self, most: int) -> Reading[int]:
        """Reads up to `most` quotes in a row; returns their number."""
        while self._quotes < most and (yield from self._char()) == self._quote:
            self._at += 1
            self._quotes += 1
        count, self._quotes = self._quotes, 0
        return count

    def _show(self, text: str) -> None:
        self._pieces.append(json_escaped(text))

    def _show_code(self, code: int, escape: str) -> None:
        """Outputs a character. Two escaped UTF-16 code units may form one character: JSON escapes
        them in the same way."""
        if 0xD800 <= code < 0xE000:
            self._pieces.append(f"\\u{code:04x}")
        else:
            self._show(chr(code) if code < 0x110000 else escape)


class DelimitedString(TextReader):
    """A string between two equal marks, without escapes, from after the first mark on."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._matcher = Matcher(mark)

    def finish(self) -> None:
        self._pieces.append(json_escaped(self._matcher.flush()))

    def _read(self) -> Reading[None]:
        self._pieces.append('"')
        yield from self._up_to(self._matcher, lambda text: self._pieces.append(json_escaped(text)))
        self._pieces.append('"')


class BareScalar(ScalarValue):
    """A number, a word of the notation, or another word, which is a string. A string is output from
    the character on that makes it one. The others are output when they end, at a character that
    cannot be part of a word."""

    _chars = re.compile(r"[-+.$\w]*")

    def __init__(self, words: Mapping[str, str]) -> None:
        super().__init__()
        self._words = words
        self._word = ""
        """The beginning of one of the words; empty if the text is not one."""
        self._number = "begin"
        """The part of a number that was read last; empty if the text is not a number."""
        self._held: list[str] = []
        self._is_string = False

    def _read(self) -> Reading[None]:
        yield from self._through(self._chars, self._push_word)
        self.finish()
        if self._is_string:
            self._pieces.append('"')

    def _push_word(self, text: str) -> None:
        for at, char in enumerate(text):
            if self._is_string:
                self._pieces.append(json_escaped(text[at:]))
                break
            self._push_char(char)

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

    def finish(self) -> None:
        if self._is_string:
            return
        word = "".join(self._held)
        value = self._words.get(word) or (as_json_number(word) if self._number else "")
        if value:
            self._pieces.append(value)
        else:
            self._begin_string()


class BareKey(BareScalar):
    """A key: always a string, even if the word is a value of the notation."""

    def __init__(self) -> None:
        super().__init__({})
        self._begin_string()


def as_json_number(word: str) -> str:
    """Returns the number as JSON; empty if the word is not a number."""
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
