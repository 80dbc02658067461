r"""Calls whose arguments are not written as JSON, read while they are written and given as JSON.

    Python   f(a=1, b=['x', None], c={'k': True})      {"a": 1, "b": ["x", null], "c": {"k": true}}
    Gemma    call:f{a:1,b:[<escape>x<escape>],c:{k:true}}

A word that is no value of the notation is a string. What is not whole when the answer ends stays
so; an escape that breaks off is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from swell.cluster.text.parsers.calls import Call, LiteralMatcher, MarkedCall, behind_space
from swell.cluster.text.parsers.json_values import Value
from swell.cluster.text.parsers.notation_values import (
    BareKey,
    BareScalar,
    DelimitedString,
    QuotedString,
)

_NAME = re.compile(r"[-.\w]*")


class Notation(msgspec.Struct, frozen=True):
    prefix: str
    """Before the name of the tool."""
    open: str
    """Begins the arguments."""
    close: str
    """Ends them."""
    assign: str
    """Between an argument's name and its value."""
    quotes: str
    """Characters that begin a string."""
    mark: str
    """Before and behind a string; empty: none."""
    brackets: Mapping[str, str]
    """Opening and closing ones of arrays."""
    words: Mapping[str, str]
    """Those that are values, and their JSON."""


_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}

PYTHON = Notation("", "(", ")", "=", "'\"", "", {"[": "]", "(": ")"}, _PYTHON_WORDS)
FUNCTION_GEMMA = Notation("call:", "{", "}", ":", '"', "<escape>", {"[": "]"}, _PYTHON_WORDS)
GEMMA4 = Notation("call:", "{", "}", ":", '"', '<|"|>', {"[": "]"}, _PYTHON_WORDS)


class NotationHead(MarkedCall):
    """The name of a call, up to the bracket that opens its arguments."""

    def __init__(self, notation: Notation) -> None:
        super().__init__()
        self._notation = notation
        if notation.prefix:
            self._expect({notation.prefix: self._begin_name})
        else:
            self._read_run(_NAME, self._end_name)

    def _begin_name(self, _: str) -> None:
        self._read_run(_NAME, self._end_name, skip_space=False)

    def _end_name(self, name: str) -> None:
        self.name = name
        self._expect({self._notation.open: self._end_head}, skip_space=False)

    def _end_head(self, _: str) -> None:
        self._begin_body(NotationCall(self.name, self._notation))


class NotationCall(Call):
    """A call from behind the bracket that opens its arguments.

    `known` where the first argument's value begins, or the arguments end without any.
    """

    def __init__(self, name: str, notation: Notation) -> None:
        self.name = name
        self._notation = notation
        self._out = ["{"]
        self._open = [(notation.close, notation.assign)]
        """Of each array and object that is open: what closes it, and what stands between key and
        value; arrays have none."""
        self._begun = False
        """Something stands before the next element."""
        self._marks = LiteralMatcher(notation.mark, skip_space=False)
        self._value: Value = Value()
        self._after: Callable[[str, int], int] = self._after_value
        self._state = self._before_key

    def take(self) -> str:
        taken, self._out = "".join(self._out), []
        return taken

    def flush(self) -> None:
        if self._state == self._in_value:
            self._value.flush()
            self._out.append(self._value.take())

    # ------------------------------------------------------------------------------- elements

    @behind_space
    def _before_key(self, text: str, at: int) -> int:
        if text[at] == self._open[-1][0]:
            return self._close(at)
        return self._begin(text[at], at, self._before_assign, BareKey())

    @behind_space
    def _before_assign(self, text: str, at: int) -> int:
        if text[at] != self._open[-1][1]:
            self.ended = True
            return at
        self._out.append(": ")
        self._state = self._before_value
        return at + 1

    @behind_space
    def _before_value(self, text: str, at: int) -> int:
        char, notation = text[at], self._notation
        closer, assign = self._open[-1]
        if char == closer and not assign:
            return self._close(at)
        if char in notation.brackets:
            return self._nest("[", (notation.brackets[char], ""), self._before_value, at)
        if char == "{":
            return self._nest("{", ("}", ":"), self._before_key, at)
        return self._begin(char, at, self._after_value, BareScalar(notation.words))

    @behind_space
    def _after_value(self, text: str, at: int) -> int:
        closer, assign = self._open[-1]
        if text[at] == closer:
            return self._close(at)
        if text[at] != ",":
            self.ended = True
            return at
        self._begun = True
        self._state = self._before_key if assign else self._before_value
        return at + 1

    # ---------------------------------------------------------------------------------- moves

    def _begin(self, char: str, at: int, after: Callable[[str, int], int], word: Value) -> int:
        """A string or a word begins with `char`, or the call is broken there."""
        if self._notation.mark[:1] == char:
            self._after, self._state = after, self._in_mark
            return at
        if char in self._notation.quotes:
            value: Value = QuotedString(char)
        elif BareScalar.may_begin_with(char):
            value = word
        else:
            self.ended = True
            return at
        self._begin_value(value, after)
        return at

    def _begin_value(self, value: Value, after: Callable[[str, int], int]) -> None:
        self._separate()
        self.known = self.known or after == self._after_value
        self._value, self._after, self._state = value, after, self._in_value
        self._out.append(value.take())

    def _in_mark(self, text: str, at: int) -> int:
        mark, possible, at = self._marks.push(text, at)
        if mark is not None:
            self._begin_value(DelimitedString(mark), self._after)
        elif not possible:
            self.ended, self.unread = True, self._marks.begun
        return at

    def _in_value(self, text: str, at: int) -> int:
        at = self._value.push(text, at)
        self._out.append(self._value.take())
        if self._value.done:
            self._state = self._after
        return at

    def _separate(self) -> None:
        if self._begun:
            self._begun = False
            self._out.append(", ")

    def _nest(
        self, opened: str, frame: tuple[str, str], state: Callable[[str, int], int], at: int
    ) -> int:
        self._separate()
        self.known = True
        self._out.append(opened)
        self._open.append(frame)
        self._state = state
        return at + 1

    def _close(self, at: int) -> int:
        _, assign = self._open.pop()
        self._begun = False
        self._out.append("}" if assign else "]")
        self._state = self._after_value
        if not self._open:
            self.known = self.ended = True
        return at + 1
