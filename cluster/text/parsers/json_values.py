"""JSON values, read while they are written: from the first character on, in one pass."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.values import TypedText

REPLACEMENT = "\ufffd"
HEX = frozenset("0123456789abcdefABCDEF")

_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
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

    @staticmethod
    def may_begin_with(char: str) -> bool:
        return end_of(_SCALAR, char, 0) == 1

    def push(self, text: str, at: int) -> int:
        end = end_of(_SCALAR, text, at)
        self._pieces.append(text[at:end])
        self.done = end < len(text)
        return end


class RawValue(Value):
    """An object or an array, as it is written.

    `fence`: characters that end it wherever they stand outside a string, because the format's
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


class StringValue(Value):
    """A string, decoded. An escape that JSON does not know is text, a lone surrogate U+FFFD."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._escape = ""
        self._high_surrogate = 0

    def push(self, text: str, at: int) -> int:
        if not self._opened:
            self._opened = True
            at += 1
        while at < len(text) and not self.done:
            if self._escape:
                at = self._push_escape(text, at)
                continue
            end = end_of(_IN_STRING, text, at)
            self._show(text[at:end])
            at = end
            if at < len(text):
                if text[at] == '"':
                    self._end_pair()
                    self.done = True
                else:
                    self._escape = "\\"
                at += 1
        return at

    def flush(self) -> None:
        """An escape that breaks off is text."""
        self._show(self._escape)
        self._end_pair()
        self._escape = ""

    def _push_escape(self, text: str, at: int) -> int:
        char = text[at]
        if len(self._escape) > 1 and char not in HEX:
            self._show(self._escape)
            self._escape = ""
            return at
        self._escape += char
        if len(self._escape) == 2 and char != "u":
            self._show(_ESCAPES.get(char, self._escape))
            self._escape = ""
        elif len(self._escape) == 6:
            self._show_unit(int(self._escape[2:], 16))
            self._escape = ""
        return at + 1

    def _show(self, text: str) -> None:
        if text:
            self._end_pair()
            self._pieces.append(text)

    def _show_unit(self, unit: int) -> None:
        """A UTF-16 code unit: two of them may be one character."""
        if 0xDC00 <= unit < 0xE000 and self._high_surrogate:
            high, self._high_surrogate = self._high_surrogate, 0
            self._pieces.append(chr(0x10000 + ((high - 0xD800) << 10) + (unit - 0xDC00)))
        elif 0xD800 <= unit < 0xDC00:
            self._end_pair()
            self._high_surrogate = unit
        else:
            self._show(REPLACEMENT if 0xDC00 <= unit < 0xE000 else chr(unit))

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
