"""Readers of calls written as JSON, while they stream.

    {"name": "f", "arguments": {"a": [1, "}"]}}
    ╰─────── syntax ──────────╯╰─ forwarded ─╯╰ syntax

The object around a call is parsed strictly. The value of its arguments is forwarded as the model
wrote it, so the reader only searches for its end: it counts brackets outside strings, and checks
nothing else. The text is read character by character in one pass, and never again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from swell.cluster.text.parsers.call_reader import MAX_NAME_CHARS, Call
from swell.cluster.text.parsers.notations.json_values import (
    IN_STRING,
    ScalarValue,
    StringArguments,
    StringValue,
)
from swell.cluster.text.parsers.text_reader import NotRead, Reading

DELIMITED_NAME = re.compile(rf"[^\s<>]{{0,{MAX_NAME_CHARS + 1}}}")


class JsonCall(Call):
    """A call with arguments in JSON: an object, or a string that contains their text."""

    fence = ""
    """First characters of the text after the arguments. They end arguments that a model forgot to
    close."""
    _has_arguments = False
    _string: StringArguments | None = None

    def finish(self) -> None:
        if self._string is not None:
            self._string.finish()
            self._pieces.append(self._string.take())

    def _read_arguments(self) -> Reading[None]:
        """Reads the arguments. The call is `known` where they begin, if it has a name."""
        char = yield from self._next()
        if char not in '{"':
            raise NotRead
        self._has_arguments = True
        self.known = bool(self.name)
        if char == "{":
            yield from self._read_raw(self._pieces.append)
        else:
            self._string = StringArguments()
            yield from self._follow(self._string, self._pieces.append)
            self._string = None

    def _read_raw(self, give: Callable[[str], None]) -> Reading[None]:
        """Reads an object or an array without changing it. A character of `fence` outside a string
        ends it: a model that forgets a bracket still closes its call."""
        outside = re.compile(f'[^"{{}}\\[\\]{re.escape(self.fence)}]*')
        depth = 0
        while True:
            char = yield from self._through(outside, give)
            if char in self.fence:
                return
            yield from self._read_char(give)
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
            if char == '"':
                yield from self._read_raw_string(give)
            elif depth == 0:
                return

    def _read_raw_string(self, give: Callable[[str], None]) -> Reading[None]:
        while (yield from self._through(IN_STRING, give)) == "\\":
            yield from self._read_char(give)
            yield from self._read_char(give)
        yield from self._read_char(give)

    def _read_char(self, give: Callable[[str], None]) -> Reading[None]:
        give((yield from self._char()))
        self._at += 1

    def _read_string(self) -> Reading[str]:
        value = StringValue()
        if (yield from self._next()) != '"':
            raise NotRead
        yield from self._follow(value)
        return value.take()


class CallReader(JsonCall):
    """Reads one call, `{"name": ..., "arguments": ...}`, from its brace on.

    Whether it is a call at all is decided by the text up to where it becomes `known`. Keys may come
    in any order; if a key is written twice, the first counts. `argument_keys` are the names of the
    arguments' key. `other_keys` are keys that may precede that one; None allows any. `names` are
    the names that a call may have.
    """

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
        self.fence = fence
        self._names = names

    def _read(self) -> Reading[None]:
        yield from self._pass("{")
        while (yield from self._next()) != "}":
            key = yield from self._read_key()
            yield from self._pass(":")
            yield from self._read_member(key)
            if (yield from self._next()) == ",":
                self._at += 1
            elif self._text[self._at] != "}":
                raise NotRead
        # A complete object that is not a call keeps its brace unread.
        self._at += self.known

    def _read_key(self) -> Reading[str]:
        if self.known or self._other_keys is None:
            return (yield from self._read_string())
        # Only keys that may still follow, so that other objects are not held back until they end.
        names = () if self.name else ("name",)
        arguments = () if self._has_arguments else self._argument_keys
        yield from self._pass('"')
        keys = [f'{key}"' for key in (*names, *arguments, *self._other_keys)]
        return (yield from self._one_of(*keys, skip_space=False))[:-1]

    def _read_member(self, key: str) -> Reading[None]:
        if key == "name" and not self.name:
            self.name = yield from self._read_string()
            if not self.name or (self._names is not None and self.name not in self._names):
                raise NotRead
            self.known = self._has_arguments
        elif key in self._argument_keys and not self._has_arguments:
            yield from self._read_arguments()
        else:
            yield from self._read_other()

    def _read_other(self) -> Reading[None]:
        char = yield from self._next()
        if char == '"':
            yield from self._read_string()
        elif char in "{[":
            yield from self._read_raw(lambda _: None)
        elif ScalarValue.may_begin_with(char):
            yield from self._follow(ScalarValue())
        else:
            raise NotRead
