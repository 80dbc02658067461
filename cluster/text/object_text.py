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

from typing import Any

import msgspec

from swell.cluster.text.parsers.calls import behind_space
from swell.cluster.text.parsers.json_values import ScalarValue, StringValue
from swell.cluster.text.parsers.structure import StructureReader

MAX_DEPTH = 100
"""Readers of JSON have limits of their own, at 200 and more."""


class PartialObject(StructureReader):
    """Reads what a model wrote, piece by piece. What `push` gave, joined, is the text of the law;
    a number, a word and an escape are held until they are whole."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._before_object
        self._string = StringValue()
        self._is_key = False
        self._scalar = ScalarValue()
        self._out: list[str] = []
        self._num_chars = 0
        self._whole_chars = 0
        """Of what was given, up to where closing the open brackets would make it JSON."""

    def push(self, text: str) -> str:
        at = 0
        while at < len(text):
            at = self._state(text, at)
        given, self._out = "".join(self._out), []
        return given

    def close(self, given: str) -> str:
        """All that `push` gave, as JSON: without what is unfinished, and with its brackets."""
        closers = "".join(closer for closer, _ in reversed(self._open))
        return given[: self._whole_chars] + closers if self._whole_chars else "{}"

    def _give(self, text: str) -> None:
        self._out.append(text)
        self._num_chars += len(text)

    _on_token = _on_space = _give

    def _stop(self, at: int) -> int:
        self._state = self._stopped
        return at

    def _stopped(self, text: str, at: int) -> int:
        """Nothing more is read: the object is over, or cannot go on like this."""
        return len(text)

    @behind_space
    def _before_object(self, text: str, at: int) -> int:
        return self._begin("{", at, is_key=False) if text[at] == "{" else self._stop(at)

    def _begin(self, char: str, at: int, *, is_key: bool) -> int:
        if char == '"':
            self._give(char)
            self._string, self._is_key, self._state = StringValue(), is_key, self._in_string
        elif is_key or (char in "{[" and len(self._open) == MAX_DEPTH):
            self._state = self._stopped
        elif char in "{[":
            at = self._nest("}", ":", at) if char == "{" else self._nest("]", "", at)
            self._whole_chars = self._num_chars
        else:
            self._scalar, self._state = ScalarValue(), self._in_scalar
        return at

    def _end_value(self) -> None:
        self._whole_chars = self._num_chars
        self._state = self._after_value if self._open else self._stopped

    def _in_string(self, text: str, at: int) -> int:
        at = self._string.push(text, at)
        self._give(_encoded(self._string.take()))
        if self._string.done:
            self._give('"')
            if self._is_key:
                self._state = self._before_separator
            else:
                self._end_value()
        return at

    def _in_scalar(self, text: str, at: int) -> int:
        at = self._scalar.push(text, at)
        if self._scalar.done:
            scalar = self._scalar.take()
            if not _is_scalar(scalar):
                return self._stop(at)
            self._give(scalar)
            self._end_value()
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
