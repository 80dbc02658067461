"""The error of a request that cannot be served, which names the field, its value and the limit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.text.params.field_path import PathNames
from swell.configs.error_text import shown


class Field(str):
    """The path of a field within the message of a `BadRequest`."""


class BadRequest(ValueError):
    """A request that cannot be served: names the field, its value and the limit. HTTP status 400.

    `param` is the path of the field, `code` a name for programs; both are as in OpenAI's API. A
    message is a text, or a list of parts: parts of type `Field` name fields of the request, and an
    API with other names for them prints those (`renamed`). If a message begins with `param`, that
    is such a part.
    """

    def __init__(
        self, message: str | Sequence[str], param: str | None = None, code: str | None = None
    ) -> None:
        parts = [message] if isinstance(message, str) else message
        head, rest = parts[0], parts[0].removeprefix(param or "")
        if rest != head and not isinstance(head, Field) and not re.match(r"\w", rest):
            parts = [Field(param), rest, *parts[1:]]
        self.message = "".join(parts)
        super().__init__(self.message)
        self._parts = parts
        self.param = param
        self.code = code

    def renamed(self, names: PathNames) -> BadRequest:
        """Returns the same error with other names of fields."""
        parts = [Field(names(part)) if isinstance(part, Field) else part for part in self._parts]
        return BadRequest(parts, None if self.param is None else names(self.param), self.code)

    def with_note(self, note: str) -> BadRequest:
        """Returns the same error with one more sentence."""
        return BadRequest([*self._parts, note], self.param, self.code)

    def within(self, path: str) -> BadRequest:
        """Returns the same error for the part of the request at `path`."""
        param = path if self.param is None else f"{path}.{self.param}"
        return BadRequest([Field(path), f": {self.message}"], param, self.code)


def bad_value(path: str, value: object, problem: str, code: str | None = None) -> BadRequest:
    """Returns the error for a field with a wrong value. `problem` follows the value, such as "must
    be at least 1"."""
    return BadRequest(f"{path}={shown(value)} {problem}", path, code)
