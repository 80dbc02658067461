"""Stricter rules for the JSON of requests that change the cluster.

If a field occurs several times, one JSON parser uses the last occurrence, and another one, such as
that of a proxy, may use the first. OpenAI's API and similar servers use the last, and so do the
routes of users. Requests with fields such as the number of engines, in contrast, must not repeat a
field.

The text is scanned token by token, in one pass, without recursion. For a text that is not JSON the
result is meaningless: its decoder refuses it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.field_path import MAX_PATH_CHARS, Key, join_path
from swell.configs.error_text import shown

MAX_DEPTH = 16
"""Maximum nesting of objects and arrays. A configuration in its body has four levels."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
"""Tokens. A string without a closing quote is one token up to the end of the text, and is scanned
only once."""
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


@dataclass
class _Level:
    """An object or an array that is open."""

    names: set[str] | None
    """Names of the fields so far of an object; None for an array."""
    at: Key
    """The current field, or the index in the array."""
    is_name: bool
    """Whether the next string is the name of a field."""


@dataclass
class _Levels:
    open: list[_Level] = field(default_factory=list)

    @property
    def path(self) -> str:
        return join_path(level.at for level in self.open)[:MAX_PATH_CHARS]

    def begin(self, *, is_object: bool) -> None:
        if len(self.open) == MAX_DEPTH:
            raise BadRequest(
                f"{self.path} is nested more than {MAX_DEPTH} levels deep; at most {MAX_DEPTH} "
                "objects and arrays may be inside each other",
                self.path,
                "too_deep",
            )
        self.open.append(_Level(set() if is_object else None, "" if is_object else 0, is_object))

    def next(self) -> None:
        """Handles a comma."""
        level = self.open[-1]
        if isinstance(level.at, int):
            level.at += 1
        level.is_name = level.names is not None

    def take_name(self, token: bytes) -> None:
        level = self.open[-1]
        assert level.names is not None, "only objects have names"
        level.at = msgspec.json.decode(token, type=str)
        if level.at in level.names:
            raise BadRequest(
                f"the field {shown(self.path)} appears more than once; send it once",
                self.path,
                "repeated_field",
            )
        level.names.add(level.at)

    def take_number(self, token: bytes) -> None:
        if math.isinf(float(token)):
            raise BadRequest(
                f"{self.path}={shown(token.decode())} is too large for a 64-bit floating point "
                "number",
                self.path,
                "invalid_type",
            )


def check_strict(body: bytes) -> None:
    """Raises `BadRequest` for a repeated field, too many levels, and a number that overflows."""
    levels = _Levels()
    try:
        for found in _TOKEN.finditer(body):
            _follow(levels, found[0])
    except (msgspec.DecodeError, UnicodeError):
        """A name that is not a valid string: the decoder refuses it."""


def _follow(levels: _Levels, token: bytes) -> None:
    if token in (b"{", b"["):
        levels.begin(is_object=token == b"{")
    elif not levels.open:
        return
    elif token in (b"}", b"]"):
        levels.open.pop()
    elif token == b",":
        levels.next()
    elif token == b":":
        levels.open[-1].is_name = False
    elif token.startswith(b'"'):
        if levels.open[-1].is_name:
            levels.take_name(token)
    elif _NUMBER.fullmatch(token):
        levels.take_number(token)
