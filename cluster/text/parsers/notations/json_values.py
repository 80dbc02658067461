"""Readers of JSON values while they stream: from the first character on, in one pass."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping

from swell.cluster.text.parsers.marker_search import end_of
from swell.cluster.text.parsers.notations.typed_text import TypedText
from swell.cluster.text.parsers.text_reader import Reading, TextReader

REPLACEMENT = "\ufffd"
HEX = frozenset("0123456789abcdefABCDEF")

IN_STRING = re.compile(r'[^"\\]*')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ScalarValue(TextReader):
    """A number, true, false or null. It ends at the first character that cannot be part of one."""

    _chars = re.compile(r"[-+.0-9A-Za-z]*")

    @classmethod
    def may_begin_with(cls, char: str) -> bool:
        return end_of(cls._chars, char, 0) == 1

    def _read(self) -> Reading[None]:
        yield from self._through(self._chars, self._pieces.append)


class EscapedString(TextReader):
    """A string with escapes. An escape that is unknown or incomplete is text."""

    _escapes: Mapping[str, str]
    """Maps the character after the backslash to what it means."""
    _code_digits: Mapping[str, int]
    """Maps the character after the backslash to the number of hexadecimal digits that follow it."""

    _escape = ""
    """The part of an escape that was read."""

    @abstractmethod
    def _show(self, text: str) -> None:
        """Outputs this text of the string."""

    @abstractmethod
    def _show_code(self, code: int, escape: str) -> None:
        """Outputs the character with this code, which `escape` stands for."""

    def _read_escape(self) -> Reading[None]:
        self._escape = escape = "\\"
        self._at += 1
        kind = yield from self._char()
        num_digits = self._code_digits.get(kind, 0)
        while len(escape) < 2 + num_digits:
            char = yield from self._char()
            if len(escape) > 1 and char not in HEX:
                break
            self._at += 1
            self._escape = escape = escape + char
        self._escape = ""
        if num_digits and len(escape) == 2 + num_digits:
            self._show_code(int(escape[2:], 16), escape)
        else:
            self._show(self._escapes.get(kind, escape))


class StringValue(EscapedString):
    """A JSON string, decoded; a lone surrogate becomes U+FFFD."""

    _escapes = _ESCAPES
    _code_digits: Mapping[str, int] = {"u": 4}

    _high_surrogate = 0

    def finish(self) -> None:
        self._show(self._escape)
        self._end_pair()

    def _read(self) -> Reading[None]:
        self._at += 1
        while (yield from self._through(IN_STRING, self._show)) == "\\":
            yield from self._read_escape()
        self._at += 1
        self._end_pair()

    def _show(self, text: str) -> None:
        if text:
            self._end_pair()
            self._pieces.append(text)

    def _show_code(self, code: int, escape: str) -> None:
        """Outputs a UTF-16 code unit; two of them may form one character."""
        if 0xDC00 <= code < 0xE000 and self._high_surrogate:
            high, self._high_surrogate = self._high_surrogate, 0
            self._pieces.append(chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00)))
        elif 0xD800 <= code < 0xDC00:
            self._end_pair()
            self._high_surrogate = code
        else:
            self._show(REPLACEMENT if 0xDC00 <= code < 0xE000 else chr(code))

    def _end_pair(self) -> None:
        if self._high_surrogate:
            self._high_surrogate = 0
            self._pieces.append(REPLACEMENT)


class StringArguments(StringValue):
    """Arguments that a model has put into a string: the object that it contains. A string with
    other contents stays a string, so that the arguments are JSON; an empty one means no
    arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._typed = TypedText(frozenset(("object", "string")))
        self._cut = False
        self._given = False

    def take(self) -> str:
        text = self._typed.push(super().take())
        if self._given or not (self.ended or self._cut):
            return text
        self._given = True
        if self._cut:
            return text + self._typed.flush()
        end = self._typed.end()
        return text + end if text or end != '""' else "{}"

    def finish(self) -> None:
        super().finish()
        self._cut = not self.ended
