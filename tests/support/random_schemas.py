"""Random schemas of a tool's arguments, as zod, pydantic and their relatives write them."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("city", "unit", "items", "tags", "kind", "when", "x_y", "userId")
_WORDS = ("a", "b", "celsius", "<x>", "a b", "é", "")
_PATTERNS = (r"^[A-Z]{2}\d{3}$", r"^[a-z0-9]+(?:-[a-z0-9]+)*$", "abc", r"^\S+$", "^(?!x)[a-z]+$")
_FORMATS = ("date-time", "date", "uuid", "email", "time", "ipv4", "password")
_SAFE = 2**53 - 1
_TEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"minLength": 1},
    {"minLength": 2, "maxLength": 5},
    {"maxLength": 3},
    {"enum": ["a", 1]},
    {"const": "x y"},
)
_NUMBERS: tuple[dict[str, Any], ...] = (
    {},
    {"minimum": -_SAFE, "maximum": _SAFE},
    {"exclusiveMinimum": 0},
    {"minimum": -5, "maximum": 12},
    {"minimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0, "maximum": 255, "multipleOf": 5},
    {"multipleOf": 3},
    {"enum": [1, 2, 10]},
)
_MIXED: tuple[Any, ...] = (
    {"enum": ["a", 1]},
    {"enum": [None, "a"]},
    {"enum": [1.5, True, [2]]},
    {"const": {"a": [1]}},
    {"const": None},
    {"type": ["string", "null"]},
    {"type": ["string", "null"], "enum": ["a", None, 3]},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2},
    {"type": "boolean"},
    {"type": "null"},
    {"description": "any"},
    True,
)


def random_schema(seed: int) -> dict[str, Any]:
    """Returns the schema of an object."""
    made = _Schemas(random.Random(seed))
    schema = made.object(0)
    return {**schema, "$defs": made.definitions} if made.definitions else schema


class _Schemas:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left = 12
        """How many more schemas may have parts."""
        self.definitions: dict[str, Any] = {}

    def object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0 if depth else 1, 3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
        }
        others = rng.choice((False, False, None, True, {"type": "string"}))
        return schema if others is None else {**schema, "additionalProperties": others}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        self._left -= 1
        simple = (self._text, self._number, lambda _: rng.choice(_MIXED))
        parts = (self._list, self._tuple, self.object, self._record, self._either, self._defined)
        nested = self._left > 0 and depth < 4 and rng.random() < 0.5
        schema = rng.choice(parts if nested else simple)(depth)
        if isinstance(schema, dict) and rng.random() < 0.3:
            return {**schema, "description": "about", "default": None}
        return schema

    def _text(self, _depth: int) -> Any:
        rng = self._rng
        kinds = [
            rng.choice(_TEXTS),
            {"enum": rng.sample(_WORDS, 3)},
            {"pattern": rng.choice(_PATTERNS)},
            {"format": rng.choice(_FORMATS)},
        ]
        return {"type": "string", **rng.choice(kinds)}

    def _number(self, _depth: int) -> Any:
        return {"type": self._rng.choice(("integer", "number")), **self._rng.choice(_NUMBERS)}

    def _list(self, depth: int) -> Any:
        return {"type": "array", "items": self._value(depth + 1), "maxItems": 3}

    def _tuple(self, depth: int) -> Any:
        parts = [self._value(depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}

    def _record(self, depth: int) -> Any:
        names, values = {"type": "string"}, self._value(depth + 1)
        return {"type": "object", "propertyNames": names, "additionalProperties": values}

    def _either(self, depth: int) -> Any:
        tagged = []
        for tag in ("cat", "dog"):
            one = self.object(depth + 1)
            one["properties"] = {"type": {"type": "string", "const": tag}, **one["properties"]}
            tagged.append({**one, "required": ["type", *one["required"]]})
        discriminated = {"oneOf": tagged, "discriminator": {"propertyName": "type"}}
        nullable = {"anyOf": [self._value(depth + 1), {"type": "null"}]}
        return self._rng.choice((discriminated, {"anyOf": tagged}, nullable))

    def _defined(self, depth: int) -> Any:
        name = f"Part{len(self.definitions)}"
        self.definitions[name] = {}
        kind = self._rng.choice((self.object, self._text, self._number))
        self.definitions[name] = kind(depth + 1)
        refers = {"$ref": f"#/$defs/{name}"}
        nullable = {"anyOf": [refers, {"type": "null"}], "default": None}
        return self._rng.choice((refers, {"allOf": [refers], "title": name}, nullable))
