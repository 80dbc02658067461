"""Calls written as JSON, read while they are written.

    {"name": "f", "arguments": {"a": [1, "}"]}}
    ╰─────── syntax ──────────╯╰─ forwarded ─╯╰ syntax

The object around a call is read strictly. The value of its arguments is forwarded as the model
wrote it, so only its end is searched for: brackets are counted outside strings, and nothing else is
checked. Such a text is read character for character in one pass; no state reads it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, Call, MarkedCall
from swell.cluster.text.parsers.json_values import (
    RawValue,
    ScalarValue,
    StringArguments,
    StringValue,
    Value,
)
from swell.cluster.text.parsers.structure import StructureReader

DELIMITED_NAME = re.compile(rf"[^\s<>]{{0,{MAX_NAME_CHARS + 1}}}")


class CallReader(StructureReader, Call):
    """One call, `{"name": ..., "arguments": ...}`, from its brace on.

    `known` as soon as it has a name and its arguments begin, which are an object, or a string
    whose content is then their text. What comes before that decides whether it is a call at all;
    what follows decides nothing. Keys may come in any order; of a key that is written twice
    the first counts. `argument_keys` are the names of the arguments' key. `other_keys`: keys that
    may precede that, None for any. `names`: those that a call may have.
    """

    _allows_last_comma = True

    def __init__(
        self,
        *,
        argument_keys: tuple[str, ...] = ("arguments",),
        other_keys: tuple[str, ...] | None = None,
        fence: str = "",
        names: Container[str] | None = None,
    ) -> None:
        super().__init__()
        self._argument_keys = argument_keys
        self._other_keys = other_keys
        self._fence = fence
        self._names = names
        self._value: Value
        self._after: Callable[[str], None]
        self._key = ""
        self._arguments: Value | None = None

    def take(self) -> str:
        return "" if self._arguments is None else self._arguments.take()

    def flush(self) -> None:
        if self._arguments is not None:
            self._arguments.flush()

    # ----------------------------------------------------------------------------- structure

    def _stop(self, at: int) -> int:
        self.ended = True
        return at

    def _close(self, at: int) -> int:
        """A whole object without what makes it a call is none, so its brace is not read."""
        self.ended = True
        return at + 1 if self.known else at

    def _begin(self, char: str, at: int, *, is_key: bool) -> int:
        if not self._open:
            return self._nest("}", ":", at) if char == "{" else self._stop(at)
        if not is_key:
            return self._begin_member(char, at)
        if char != '"':
            return self._stop(at)
        if self.known or self._other_keys is None:
            return self._begin_value(StringValue(), self._end_key, at)
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
            return self._stop(at)
        return at + 1

    def _open_keys(self) -> tuple[str, ...]:
        names = () if self.name else ("name",)
        arguments = () if self._arguments is not None else self._argument_keys
        return names + arguments + (self._other_keys or ())

    # -------------------------------------------------------------------------------- values

    def _begin_member(self, char: str, at: int) -> int:
        if self._key == "name" and not self.name:
            return self._begin_value(StringValue(), self._end_name, at, fits=char == '"')
        value: Value = StringValue() if char == '"' else RawValue(self._fence)
        if self._key in self._argument_keys and self._arguments is None:
            value = StringArguments() if char == '"' else value
            if char in '{"':
                self._arguments = value
                self.known = bool(self.name)
            return self._begin_value(value, self._end_other, at, fits=char in '{"')
        if char not in '{["':
            value = ScalarValue()
        fits = char in '{["' or ScalarValue.may_begin_with(char)
        return self._begin_value(value, self._end_other, at, fits=fits)

    def _begin_value(
        self, value: Value, after: Callable[[str], None], at: int, *, fits: bool = True
    ) -> int:
        """The value's first character is at `at`, if it `fits`: the value reads it."""
        if not fits:
            return self._stop(at)
        self._value, self._after = value, after
        self._state = self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        at = self._value.push(text, at)
        if self._value.broken:
            self.ended = True
        elif self._value.done:
            self._after("" if self._value is self._arguments else self._value.take())
        return at

    def _end_key(self, key: str) -> None:
        self._key = key
        self._state = self._before_separator

    def _end_name(self, name: str) -> None:
        self.name = name
        self.ended = not name or (self._names is not None and name not in self._names)
        self.known = not self.ended and self._arguments is not None
        self._state = self._after_value

    def _end_other(self, _: str) -> None:
        self._state = self._after_value


class BareArguments(CallReader):
    """The arguments of a call whose name is known already, without an object around them."""

    def __init__(self, name: str, fence: str = "", call_id: str = "") -> None:
        super().__init__(fence=fence)
        self.name, self.id = name, call_id
        self._key = self._argument_keys[0]
        self._open = [("", "")]

    def _end_other(self, _: str) -> None:
        self.ended = True


class DelimitedCall(MarkedCall):
    """A call whose arguments are JSON between the markers of its format, which reads the head, up
    to `_begin_arguments`."""

    ends: tuple[str, ...]
    """What follows the arguments."""
    fence = ""
    """First characters of those, at which arguments that a model forgot to close end."""

    def __init__(self) -> None:
        self._arguments: BareArguments | None = None
        self._read_run(DELIMITED_NAME, self._end_word)

    def _end_word(self, word: str) -> None:
        """The first word of the head is `word`."""
        raise NotImplementedError

    def _begin_arguments(self, _: str) -> None:
        self._arguments = BareArguments(self.name, self.fence)
        self._state = self._in_arguments

    def _in_arguments(self, text: str, at: int) -> int:
        arguments = self._arguments
        assert arguments is not None
        at = arguments.push(text, at)
        self.known = arguments.known
        if arguments.ended and not self.known:
            self._break("")
        elif arguments.ended:
            self._expect(dict.fromkeys(self.ends, self._end))
        return at

    def _end(self, _: str) -> None:
        self.ended = True

    def take(self) -> str:
        return "" if self._arguments is None else self._arguments.take()

    def flush(self) -> None:
        if self._arguments is not None:
            self._arguments.flush()
