r"""Calls whose arguments are not written as JSON, read while they are written and given as JSON.

    Python   f(a=1, b=['x', None], c={'k': True})      {"a": 1, "b": ["x", null], "c": {"k": true}}
    Gemma    call:f{a:1,b:[<escape>x<escape>],c:{k:true}}

A word that is no value of the notation is a string. What is not whole when the answer ends stays
so; an escape that breaks off is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from swell.cluster.text.parsers.calls import Call, LiteralMatcher, MarkedCall
from swell.cluster.text.parsers.json_values import Value
from swell.cluster.text.parsers.notation_values import (
    BareKey,
    BareScalar,
    DelimitedString,
    QuotedString,
)
from swell.cluster.text.parsers.structure import StructureReader

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
    """Before and after a string; empty: none."""
    brackets: Mapping[str, tuple[str, str]]
    """What opens arrays and objects -> what closes them, and what separates key and value."""
    words: Mapping[str, str]
    """Those that are values, and their JSON."""


_BRACKETS = {"[": ("]", ""), "{": ("}", ":")}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}

PYTHON = Notation("", "(", ")", "=", "'\"", "", {**_BRACKETS, "(": (")", "")}, _PYTHON_WORDS)
FUNCTION_GEMMA = Notation("call:", "{", "}", ":", '"', "<escape>", _BRACKETS, _PYTHON_WORDS)
GEMMA4 = Notation("call:", "{", "}", ":", '"', '<|"|>', _BRACKETS, _PYTHON_WORDS)


class NotationHead(MarkedCall):
    """The name of a call, up to the bracket that opens its arguments."""

    def __init__(self, notation: Notation) -> None:
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


class NotationCall(StructureReader, Call):
    """A call, from after the bracket that opens its arguments.

    `known` where the first argument's value begins, or the arguments end without any.
    """

    _allows_last_comma = True

    def __init__(self, name: str, notation: Notation) -> None:
        super().__init__()
        self.name = name
        self._notation = notation
        self._out = ["{"]
        self._open = [(notation.close, notation.assign)]
        self._state = self._before_first
        self._comma_is_due = False
        """Something precedes the next element."""
        self._value = Value()
        self._is_key = False
        self._marks: LiteralMatcher

    def take(self) -> str:
        taken, self._out = "".join(self._out), []
        return taken

    def flush(self) -> None:
        if self._state == self._in_value:
            self._value.flush()
            self._out.append(self._value.take())

    # -------------------------------------------------------------------------------- tokens

    def _on_token(self, text: str) -> None:
        if text == ",":
            self._comma_is_due = True
        elif text in "}]:":
            self._comma_is_due = False
            self._out.append(": " if text == ":" else text)
        else:
            self._separate()
            self.known = True
            self._out.append(text)

    def _separate(self) -> None:
        if self._comma_is_due:
            self._comma_is_due = False
            self._out.append(", ")

    def _stop(self, at: int) -> int:
        self.ended = True
        return at

    # -------------------------------------------------------------------------------- values

    def _begin(self, char: str, at: int, *, is_key: bool) -> int:
        notation, self._is_key = self._notation, is_key
        if not is_key and char in notation.brackets:
            return self._nest(*notation.brackets[char], at)
        if notation.mark[:1] == char:
            self._marks = LiteralMatcher(notation.mark, skip_space=False)
            self._state = self._in_mark
        elif char in notation.quotes:
            self._begin_value(QuotedString(char))
        elif BareScalar.may_begin_with(char):
            self._begin_value(BareKey() if is_key else BareScalar(notation.words))
        else:
            self.ended = True
        return at

    def _begin_value(self, value: Value) -> None:
        self._separate()
        self.known = self.known or not self._is_key
        self._value, self._state = value, self._in_value
        self._out.append(value.take())

    def _in_mark(self, text: str, at: int) -> int:
        mark, possible, at = self._marks.push(text, at)
        if mark is not None:
            self._begin_value(DelimitedString(mark))
        elif not possible:
            self.ended, self.unread = True, self._marks.begun
        return at

    def _in_value(self, text: str, at: int) -> int:
        at = self._value.push(text, at)
        self._out.append(self._value.take())
        if self._value.done:
            self._state = self._before_separator if self._is_key else self._after_value
        return at

    def _end_value(self) -> None:
        super()._end_value()
        if not self._open:
            self.known = self.ended = True
