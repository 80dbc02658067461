"""Calls written as JSON, read while they are written.

    {"name": "f", "arguments": {"a": [1, "}"]}}
    ╰─────── syntax ──────────╯╰─ forwarded ─╯╰ syntax

The object around a call is read strictly. The value of its arguments is forwarded as the model
wrote it, so only its end is searched for: brackets are counted outside strings, and nothing else is
checked. Such a text is read character for character in one pass; no state looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from swell.cluster.text.parsers.calls import SPACE, Call, behind_space, end_of
from swell.cluster.text.parsers.json_values import (
    RawValue,
    ScalarValue,
    StringArguments,
    StringValue,
    Value,
)


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
        at = end_of(SPACE, text, at)
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

    @behind_space
    def _before_value(self, text: str, at: int) -> int:
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
        fits = char in '{["' or ScalarValue.may_begin_with(char)
        return self._begin_if(fits, value, self._end_other, at)

    def _before_comma(self, text: str, at: int) -> int:
        return self._expect(text, at, {",": self._before_key, "}": None})

    def _expect(
        self, text: str, at: int, states: dict[str, Callable[[str, int], int] | None]
    ) -> int:
        """Behind whitespace one of these characters must come; None is the end of the call."""
        at = end_of(SPACE, text, at)
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

    def __init__(self, name: str, fence: str = "", call_id: str = "") -> None:
        super().__init__(fence=fence)
        self.name, self.id = name, call_id
        self._key = self._argument_keys[0]
        self._state = self._before_value

    def _end_other(self, _: str) -> None:
        self.ended = True
