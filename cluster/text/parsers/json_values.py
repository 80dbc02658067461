"""JSON values, read while they are written: from the first character on, in one pass."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.values import TypedText

REPLACEMENT = "\ufffd"
HEX = frozenset("0123456789abcdefABCDEF")

_IN_STRING = re.compile(r'[^"\\]*')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Value:
    """One JSON value from its first character on. `take` gives what of it is readable."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        """The value cannot go on at the character where `push` stopped."""
        self._pieces: list[str] = []

    def push(self, text: str, at: int) -> int:
        """Read from `text[at:]` to the end of the value or of the text; where reading stopped."""
        raise NotImplementedError

    def take(self) -> str:
        """The text since the last call."""
        taken, self._pieces = "".join(self._pieces), []
        return taken

    def flush(self) -> None:
        """Nothing follows."""


class ScalarValue(Value):
    """A number, true, false or null. It ends at the first character that is of none of them."""

    _chars = re.compile(r"[-+.0-9A-Za-z]*")

    @classmethod
    def may_begin_with(cls, char: str) -> bool:
        return end_of(cls._chars, char, 0) == 1

    def push(self, text: str, at: int) -> int:
        end = end_of(self._chars, text, at)
        self._pieces.append(text[at:end])
        self.done = end < len(text)
        return end


class RawValue(Value):
    """An object or an array, as it is written.

    `fence`: characters that end it wherever they occur outside a string, because the format's
    closing marker begins with them: a model that forgets a bracket still closes its call.
    """

    def __init__(self, fence: str) -> None:
        super().__init__()
        self._fence = fence
        self._outside = re.compile(f'[^"{{}}\\[\\]{re.escape(fence)}]*')
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str, at: int) -> int:
        start = at
        while at < len(text) and not self.done and not self.broken:
            at = self._push_in_string(text, at) if self._in_string else self._push_outside(text, at)
        self._pieces.append(text[start:at])
        return at

    def _push_in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = end_of(_IN_STRING, text, at)
        if at == len(text):
            return at
        self._in_string = text[at] != '"'
        self._escaped = text[at] == "\\"
        return at + 1

    def _push_outside(self, text: str, at: int) -> int:
        at = end_of(self._outside, text, at)
        if at == len(text):
            return at
        char = text[at]
        if char in self._fence:
            self.broken = True
            return at
        self._in_string = char == '"'
        self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
        self.done = self._depth == 0
        return at + 1


class EscapedString(Value):
    """A string with escapes. An escape that is unknown, or breaks off, is text."""

    _escapes: Mapping[str, str]
    """Character behind the backslash -> what it means."""
    _code_digits: Mapping[str, int]
    """Character behind the backslash -> number of hexadecimal digits that follow it."""

    def __init__(self) -> None:
        super().__init__()
        self._escape = ""

    def push(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            at = self._push_escape(text, at) if self._escape else self._push_plain(text, at)
        return at

    def _push_plain(self, text: str, at: int) -> int:
        raise NotImplementedError

    def _show(self, text: str) -> None:
        raise NotImplementedError

    def _show_code(self, code: int, escape: str) -> None:
        raise NotImplementedError

    def _push_escape(self, text: str, at: int) -> int:
        char, kind = text[at], self._escape[1:2]
        escape, self._escape = self._escape, ""
        if kind and char not in HEX:
            self._show(escape)
            return at
        escape += char
        if not kind and char not in self._code_digits:
            self._show(self._escapes.get(char, escape))
        elif kind and len(escape) == 2 + self._code_digits[kind]:
            self._show_code(int(escape[2:], 16), escape)
        else:
            self._escape = escape
        return at + 1


class StringValue(EscapedString):
    """A string of JSON, decoded; a lone surrogate is U+FFFD."""

    _escapes = _ESCAPES
    _code_digits: Mapping[str, int] = {"u": 4}

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._high_surrogate = 0

    def flush(self) -> None:
        self._show(self._escape)
        self._end_pair()
        self._escape = ""

    def _push_plain(self, text: str, at: int) -> int:
        if not self._opened:
            self._opened = True
            at += 1
        end = end_of(_IN_STRING, text, at)
        self._show(text[at:end])
        if end == len(text):
            return end
        if text[end] == '"':
            self._end_pair()
            self.done = True
        else:
            self._escape = "\\"
        return end + 1

    def _show(self, text: str) -> None:
        if text:
            self._end_pair()
            self._pieces.append(text)

    def _show_code(self, code: int, escape: str) -> None:
        """A UTF-16 code unit: two of them may be one character."""
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
    """Arguments that a model has put into a string: the object that it holds. A string that holds
    something else stays a string, so that the arguments are JSON; an empty one means no arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._typed = TypedText(frozenset(("object", "string")))
        self._cut = False
        self._ended = False

    def take(self) -> str:
        text = self._typed.push(super().take())
        if self._ended or not (self.done or self._cut):
            return text
        self._ended = True
        if self._cut:
            return text + self._typed.flush()
        end = self._typed.end()
        return text + end if text or end != '""' else "{}"

    def flush(self) -> None:
        super().flush()
        self._cut = not self.done
