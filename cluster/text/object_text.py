r"""The arguments of a tool call as Anthropic's API has them: an object, or the beginning of one.

A model may write anything. The law: *the input of a call is the longest beginning of what was
written that is the beginning of a JSON object* (RFC 8259, at most `MAX_DEPTH` deep); what is not
even that is `{}`. A stream gives this text; a whole answer has the object in it, without what is
unfinished at its end:

    {"a": [1, {"b": "x"}, 23        a stream gives    {"a": [1, {"b": "x"},␣
                                    and the input is  {"a": [1, {"b": "x"}]}

So both are the same to a client that reads unfinished JSON, as Anthropic's does. Strings are
written anew: a line break that a model forgot to escape ends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from swell.cluster.text.parsers.calls import end_of
from swell.cluster.text.parsers.json_values import ScalarValue, StringValue

MAX_DEPTH = 100
"""Readers of JSON have limits of their own, at 200 and more."""

_SPACE = re.compile(r"[ \t\r\n]*")
_CLOSERS = {"{": "}", "[": "]"}


class _Nesting(NamedTuple):
    """A bracket that is open."""

    closer: str
    depth: int
    outer: _Nesting | None


class PartialObject:
    """Reads what a model wrote, piece by piece. What `push` gave, joined, is the text of the law;
    a number, a word and an escape are held until they are whole."""

    def __init__(self) -> None:
        self._state: Callable[[str, int], int] = self._before_object
        self._nesting: _Nesting | None = None
        self._string = StringValue()
        self._is_key = False
        self._scalar = ScalarValue()
        self._out: list[str] = []
        self._num_chars = 0
        self._whole_chars = 0
        """Of what was given, up to where closing brackets alone would make it JSON."""
        self._open: _Nesting | None = None
        """The nesting there."""

    def push(self, text: str) -> str:
        at = 0
        while at < len(text):
            at = self._state(text, at)
        given, self._out = "".join(self._out), []
        return given

    def close(self, given: str) -> str:
        """All that `push` gave, as JSON: without what is unfinished, and with its brackets."""
        closers, left = "", self._open
        while left is not None:
            closers += left.closer
            left = left.outer
        return given[: self._whole_chars] + closers if self._whole_chars else "{}"

    def _give(self, text: str) -> None:
        self._out.append(text)
        self._num_chars += len(text)

    def _mark(self) -> None:
        """Closing brackets alone would make it JSON here."""
        self._whole_chars, self._open = self._num_chars, self._nesting

    # ------------------------------------------------------------------------- between values

    def _next(self, text: str, at: int) -> tuple[str, int]:
        """The next character that is no whitespace, and its place; '' if there is none."""
        end = end_of(_SPACE, text, at)
        self._give(text[at:end])
        return text[end : end + 1], end

    def _before_object(self, text: str, at: int) -> int:
        at = end_of(_SPACE, text, at)
        char = text[at : at + 1]
        return self._begin(char, at) if char in ("{", "") else self._stop(text)

    def _before_first_key(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        return self._end(at) if char == "}" else self._key(char, text, at)

    def _before_key(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        return self._key(char, text, at)

    def _key(self, char: str, text: str, at: int) -> int:
        if char not in ('"', ""):
            return self._stop(text)
        return self._begin(char, at, is_key=True)

    def _before_colon(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        if char not in (":", ""):
            return self._stop(text)
        if char:
            self._give(char)
            self._state = self._before_value
        return at + len(char)

    def _before_first_item(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        return self._end(at) if char == "]" else self._begin(char, at)

    def _before_value(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        return self._begin(char, at)

    def _after_value(self, text: str, at: int) -> int:
        char, at = self._next(text, at)
        assert self._nesting is not None, "behind the outermost value nothing is read"
        if char == self._nesting.closer:
            return self._end(at)
        if char not in (",", ""):
            return self._stop(text)
        if char:
            self._give(char)
            in_object = self._nesting.closer == "}"
            self._state = self._before_key if in_object else self._before_value
        return at + len(char)

    def _stop(self, text: str, at: int = 0) -> int:
        """Nothing more is read: the object is over, or cannot go on like this."""
        self._state = self._stop
        return len(text)

    # -------------------------------------------------------------------------------- values

    def _begin(self, char: str, at: int, *, is_key: bool = False) -> int:
        """A value begins with `char` at `at`."""
        if char == '"':
            self._give(char)
            self._string, self._is_key, self._state = StringValue(), is_key, self._in_string
        elif char in _CLOSERS:
            depth = 1 if self._nesting is None else self._nesting.depth + 1
            if depth > MAX_DEPTH:
                self._state = self._stop
                return at
            self._give(char)
            self._nesting = _Nesting(_CLOSERS[char], depth, self._nesting)
            self._state = self._before_first_key if char == "{" else self._before_first_item
            self._mark()
            return at + 1
        elif char:
            self._scalar, self._state = ScalarValue(), self._in_scalar
        return at

    def _end(self, at: int) -> int:
        """A bracket closes at `at`."""
        assert self._nesting is not None, "it was opened"
        self._give(self._nesting.closer)
        self._nesting = self._nesting.outer
        self._value_is_whole()
        return at + 1

    def _value_is_whole(self) -> None:
        self._mark()
        self._state = self._stop if self._nesting is None else self._after_value

    def _in_string(self, text: str, at: int) -> int:
        at = self._string.push(text, at)
        self._give(_encoded(self._string.take()))
        if self._string.done:
            self._give('"')
            if self._is_key:
                self._state = self._before_colon
            else:
                self._value_is_whole()
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        at = self._scalar.push(text, at)
        if self._scalar.done:
            scalar = self._scalar.take()
            if not _is_scalar(scalar):
                return self._stop(text)
            self._give(scalar)
            self._value_is_whole()
        return at


def read_partial_object(text: str) -> dict[str, Any]:
    """The input of a call whose arguments were written as `text`."""
    reader = PartialObject()
    value: dict[str, Any] = msgspec.json.decode(reader.close(reader.push(text)))
    return value


def _encoded(text: str) -> str:
    return msgspec.json.encode(text)[1:-1].decode()


def _is_scalar(text: str) -> bool:
    """Whether it is a number that can be held, true, false or null."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return True
