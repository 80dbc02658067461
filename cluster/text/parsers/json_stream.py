"""Calls written as JSON, read while they are written.

    {"name": "f", "arguments": {"a": [1, "}"]}}
    ╰─────── syntax ──────────╯╰─ forwarded ─╯╰ syntax

The object around a call is read strictly. The value of its arguments is forwarded as the model
wrote it, so only its end is sought: brackets are counted outside strings, and nothing else is
judged. Everything that may stand in such a text is read character for character in one pass; no
state looks back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from swell.cluster.text.parsers.calls import Call
from swell.cluster.text.parsers.calls import end_of as end_of
from swell.cluster.text.parsers.values import TypedText

REPLACEMENT = "\ufffd"

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")


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
        if len(self._escape) > 1 and char not in _HEX:
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


class CallReader(Call):
    """One call, `{"name": ..., "arguments": ...}`, from its brace on.

    `known` as soon as it has a name and its arguments begin, which are an object, or a string
    whose content is then their text. What comes before that decides whether it is a call at all;
    what comes behind decides nothing. Keys may stand in any order; of a key that is written twice
    the first counts. `argument_keys` are the names of the arguments' key. `other_keys`: keys that
    may stand there before it is known, None for any. `names`: those that a call may have.
    """

    def __init__(
        self,
        *,
        argument_keys: tuple[str, ...] = ("arguments",),
        other_keys: tuple[str, ...] | None = None,
        fence: str = "",
        names: Container[str] | None = None,
    ) -> None:
        self._argument_keys = argument_keys
        self._other_keys = other_keys
        self._fence = fence
        self._names = names
        self._state = self._at_brace
        self._after_value: Callable[[str], None] = self._end_key
        self._value: Value = StringValue()
        self._key = ""
        self._arguments: Value | None = None

    def take(self) -> str:
        return "" if self._arguments is None else self._arguments.take()

    def flush(self) -> None:
        if self._arguments is not None:
            self._arguments.flush()

    # ------------------------------------------------------------------------- between values

    def _at_brace(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._before_key})

    def _before_key(self, text: str, at: int) -> int:
        at = end_of(_SPACE, text, at)
        if text[at : at + 1] != '"':
            return self._expect(text, at, {"}": None})
        if self.known or self._other_keys is None:
            return self._begin(StringValue(), self._end_key, at)
        self._key = ""
        self._state = self._in_listed_key
        return at + 1

    def _in_listed_key(self, text: str, at: int) -> int:
        """Only keys that may still come, so that other objects are not held until they end."""
        key, char = self._key, text[at]
        open_keys = self._open_keys()
        if char == '"' and key in open_keys:
            self._end_key(key)
        elif any(one.startswith(key + char) for one in open_keys):
            self._key += char
        else:
            self.ended = True
            return at
        return at + 1

    def _open_keys(self) -> tuple[str, ...]:
        names = () if self.name else ("name",)
        arguments = () if self._arguments is not None else self._argument_keys
        return names + arguments + (self._other_keys or ())

    def _before_colon(self, text: str, at: int) -> int:
        return self._expect(text, at, {":": self._before_value})

    def _before_value(self, text: str, at: int) -> int:
        at = end_of(_SPACE, text, at)
        if at == len(text):
            return at
        char = text[at]
        if self._key == "name" and not self.name:
            return self._begin_if(char == '"', StringValue(), self._end_name, at)
        value: Value = StringValue() if char == '"' else RawValue(self._fence)
        if self._key in self._argument_keys and self._arguments is None:
            value = StringArguments() if char == '"' else value
            if char in '{"':
                self._arguments = value
                self.known = bool(self.name)
            return self._begin_if(char in '{"', value, self._end_other, at)
        if char not in '{["':
            value = ScalarValue()
        fits = char in '{["' or end_of(_SCALAR, char, 0) == 1
        return self._begin_if(fits, value, self._end_other, at)

    def _before_comma(self, text: str, at: int) -> int:
        return self._expect(text, at, {",": self._before_key, "}": None})

    def _expect(
        self, text: str, at: int, states: dict[str, Callable[[str, int], int] | None]
    ) -> int:
        """Behind whitespace one of these characters must come; None is the end of the call."""
        at = end_of(_SPACE, text, at)
        if at == len(text):
            return at
        state = states.get(text[at])
        if state is not None:
            self._state = state
            return at + 1
        self.ended = True
        # A whole object without what makes it a call is none, so its last brace is not read.
        return at + 1 if text[at] in states and self.known else at

    # -------------------------------------------------------------------------------- values

    def _begin_if(self, fits: bool, value: Value, after: Callable[[str], None], at: int) -> int:
        if not fits:
            self.ended = True
            return at
        return self._begin(value, after, at)

    def _begin(self, value: Value, after: Callable[[str], None], at: int) -> int:
        """The value's first character is at `at`: it is the value's to read."""
        self._value, self._after_value = value, after
        self._state = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        at = self._value.push(text, at)
        if self._value.broken:
            self.ended = True
        elif self._value.done:
            self._after_value("" if self._value is self._arguments else self._value.take())
        return at

    def _end_key(self, key: str) -> None:
        self._key = key
        self._state = self._before_colon

    def _end_name(self, name: str) -> None:
        self.name = name
        self.ended = not name or (self._names is not None and name not in self._names)
        self.known = not self.ended and self._arguments is not None
        self._state = self._before_comma

    def _end_other(self, _: str) -> None:
        self._state = self._before_comma


class BareArguments(CallReader):
    """The arguments of a call whose name is known already, without an object around them."""

    def __init__(self, name: str, fence: str = "") -> None:
        super().__init__(fence=fence)
        self.name = name
        self._key = self._argument_keys[0]
        self._state = self._before_value

    def _end_other(self, _: str) -> None:
        self.ended = True
