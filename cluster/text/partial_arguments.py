r"""The arguments of a tool call as Anthropic's API has them: an object, or the beginning of one.

A model may write anything. Invariant: *the input of a call is the longest prefix of the written
text that is the beginning of a JSON object* (RFC 8259, at most `MAX_DEPTH` deep, with numbers of at
most `MAX_NUMBER_CHARS` characters, as in a body); if no prefix is, it is `{}`. A stream returns
this text; a whole answer has the object in it, without the incomplete part at its end:

    {"a": [1, {"b": "x"}, 23        a stream returns  {"a": [1, {"b": "x"},␣
                                    and the input is  {"a": [1, {"b": "x"}]}

So both are equal for a client that reads incomplete JSON, as Anthropic's does. Strings are encoded
again, so that a line break that a model forgot to escape does not end the object. Numbers that no
double holds, such as `1e999`, stay as they were written; a template, which needs the number itself,
gets the largest double.
"""

from __future__ import annotations

import json
import re
import sys

import msgspec

from swell.cluster.text.json_types import JsonObject
from swell.cluster.text.parsers.notations.json_values import ScalarValue, StringValue
from swell.cluster.text.parsers.notations.structure import StructureReader
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.schema.json_size import MAX_NUMBER_CHARS

MAX_DEPTH = 100
"""Limit on nesting; readers of JSON have limits of their own, at 200 or more."""
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class PartialObject(StructureReader):
    """Reads the text of a model, piece by piece. The results of `push` together are the text of the
    invariant; a number, a word and an escape are held back until they are complete."""

    def __init__(self) -> None:
        super().__init__()
        self._num_chars = 0
        self._whole_chars = 0
        """Number of characters of the output, up to where closing the open brackets would make it
        valid JSON."""

    def push(self, text: str) -> str:
        self.read(text)
        return self.take()

    def close(self, given: str) -> str:
        """Returns everything that `push` returned as valid JSON: without the incomplete part, and
        with its brackets closed."""
        closers = "".join(closer for closer, _ in reversed(self._open))
        return given[: self._whole_chars] + closers if self._whole_chars else "{}"

    def _give(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)

    _on_token = _give

    def _on_space(self, text: str) -> None:
        if self._open:
            self._give(text)

    def _on_value(self) -> None:
        self._whole_chars = self._num_chars

    def _nest(self, char: str) -> bool:
        nested = super()._nest(char)
        if nested:
            self._on_value()
        return nested

    def _opened_by(self, char: str) -> tuple[str, str] | None:
        if len(self._open) == MAX_DEPTH and char in "{[":
            raise NotRead
        if not self._open and char != "{":
            raise NotRead
        return {"{": ("}", ":"), "[": ("]", "")}.get(char)

    def _read_scalar(self, char: str, *, is_key: bool) -> Reading[None]:
        if char == '"':
            self._give(char)
            yield from self._follow(StringValue(), lambda text: self._give(_encoded(text)))
            self._give(char)
        elif is_key:
            raise NotRead
        else:
            scalar = ScalarValue()
            yield from self._follow(scalar)
            text = scalar.take()
            if len(text) > MAX_NUMBER_CHARS or _SCALAR.fullmatch(text) is None:
                raise NotRead
            self._give(text)


def partial_object_json(text: str) -> str:
    """Returns the input, as JSON, of a call whose arguments were written as `text`."""
    reader = PartialObject()
    return reader.close(reader.push(text))


def read_partial_object(text: str) -> JsonObject:
    """Returns the same as a dict, in which a number that no double holds is the largest double."""
    written = partial_object_json(text)
    try:
        value: JsonObject = msgspec.json.decode(written)
    except msgspec.DecodeError:  # a number beyond all doubles
        value = json.loads(written, parse_float=_finite)
    return value


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _encoded(text: str) -> str:
    return msgspec.json.encode(text)[1:-1].decode()
