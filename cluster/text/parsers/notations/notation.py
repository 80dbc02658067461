r"""Readers of calls whose arguments are not JSON, which output them as JSON while they stream.

    Python   f(a=1, b=['x', None], c={'k': True})      {"a": 1, "b": ["x", null], "c": {"k": true}}
    Gemma    call:f{a:1,b:[<escape>x<escape>],c:{k:true}}

A word that is not a value of the notation is a string. Parts that are incomplete when the answer
ends stay incomplete; an incomplete escape is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from swell.cluster.text.parsers.call_reader import Call
from swell.cluster.text.parsers.notations.scalar_readers import (
    BareKey,
    BareScalar,
    DelimitedString,
    QuotedString,
)
from swell.cluster.text.parsers.notations.structure import StructureReader
from swell.cluster.text.parsers.text_reader import NotRead, Reading, TextReader

_NAME = re.compile(r"[-.\w]*")


class Notation(msgspec.Struct, frozen=True):
    prefix: str
    """Text before the name of the tool."""
    open: str
    """Text that begins the arguments."""
    close: str
    """Text that ends the arguments."""
    assign: str
    """Text between an argument's name and its value."""
    quotes: str
    """Characters that begin a string."""
    mark: str
    """Text before and after a string; empty if the notation has none."""
    brackets: Mapping[str, tuple[str, str]]
    """Maps the bracket that opens an array or object to the one that closes it, and to the
    separator of key and value."""
    words: Mapping[str, str]
    """Words that are values, with their JSON."""


_BRACKETS = {"[": ("]", ""), "{": ("}", ":")}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_JSON_WORDS, "True": "true", "False": "false", "None": "null"}

PYTHON = Notation("", "(", ")", "=", "'\"", "", {**_BRACKETS, "(": (")", "")}, _PYTHON_WORDS)
FUNCTION_GEMMA = Notation("call:", "{", "}", ":", '"', "<escape>", _BRACKETS, _PYTHON_WORDS)
GEMMA4 = Notation("call:", "{", "}", ":", '"', '<|"|>', _BRACKETS, _PYTHON_WORDS)


class NotationCall(StructureReader, Call):
    """Reads a call, from its name on.

    The call is `known` where the first argument's value begins, or where the arguments end without
    any.
    """

    _allows_last_comma = True

    def __init__(self, notation: Notation) -> None:
        super().__init__()
        self._notation = notation
        self._comma_is_due = False
        """Whether something precedes the next element."""
        self._value: TextReader | None = None

    def finish(self) -> None:
        if self._value is not None:
            self._value.finish()
            self._pieces.append(self._value.take())

    def _read(self) -> Reading[None]:
        notation = self._notation
        self.name = yield from self._read_name()
        yield from self._one_of(notation.open, skip_space=False)
        self._pieces.append("{")
        self._open = [(notation.close, notation.assign)]
        yield from super()._read()
        self.known = True

    def _read_name(self) -> Reading[str]:
        prefix = self._notation.prefix
        if prefix:
            yield from self._one_of(prefix)
        return (yield from self._run(_NAME, skip_space=not prefix))

    # -------------------------------------------------------------------------------- tokens

    def _on_token(self, text: str) -> None:
        if text == ",":
            self._comma_is_due = True
        elif text in "}]:":
            self._comma_is_due = False
            self._pieces.append(": " if text == ":" else text)
        else:
            self._separate()
            self.known = True
            self._pieces.append(text)

    def _separate(self) -> None:
        if self._comma_is_due:
            self._comma_is_due = False
            self._pieces.append(", ")

    # -------------------------------------------------------------------------------- values

    def _opened_by(self, char: str) -> tuple[str, str] | None:
        return self._notation.brackets.get(char)

    def _read_scalar(self, char: str, *, is_key: bool) -> Reading[None]:
        value = yield from self._begun_by(char, is_key=is_key)
        self._separate()
        self.known = self.known or not is_key
        self._value = value
        yield from self._follow(value, self._pieces.append)
        self._value = None

    def _begun_by(self, char: str, *, is_key: bool) -> Reading[TextReader]:
        notation = self._notation
        if notation.mark[:1] == char:
            return DelimitedString((yield from self._one_of(notation.mark, skip_space=False)))
        if char in notation.quotes:
            return QuotedString(char)
        if BareScalar.may_begin_with(char):
            return BareKey() if is_key else BareScalar(notation.words)
        raise NotRead
