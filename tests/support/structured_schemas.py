"""JSON schemas as people write them, each with a value that it accepts.

The name of a schema says what it contains.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool


_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}
_NULL = {"type": "null"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns an object schema that requires all properties and allows no others, as OpenAI's
    strict mode demands."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = _INTEGER
    for _ in range(depth):
        schema = _object({"in": schema})
    return schema


def _nested_value(depth: int) -> Any:
    value: Any = 7
    for _ in range(depth):
        value = {"in": value}
    return value


_KINDS = ("string", "integer", "boolean", "null")
_WIDE = {f"field_{i:03}": {"type": _KINDS[i % 4]} for i in range(200)}
_WIDE_VALUE = {name: ["text", 1, True, None][i % 4] for i, name in enumerate(_WIDE)}

_TREE = {
    "$defs": {
        "node": _object(
            {"value": _INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}
        )
    },
    "$ref": "#/$defs/node",
}

_LINKED = {
    "type": "object",
    "properties": {"id": _INTEGER, "next": {"anyOf": [_NULL, {"$ref": "#"}]}},
    "required": ["id", "next"],
    "additionalProperties": False,
}

_EXPRESSION = {
    "$ref": "#/definitions/expression",
    "definitions": {
        "expression": {
            "anyOf": [
                _NUMBER,
                _object(
                    {
                        "op": {"enum": ["+", "-", "*", "/"]},
                        "left": {"$ref": "#/definitions/expression"},
                        "right": {"$ref": "#/definitions/expression"},
                    }
                ),
            ]
        }
    },
}

_MUTUAL = {
    "$defs": {
        "folder": _object(
            {"name": _TEXT, "entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}}}
        ),
        "entry": {"anyOf": [{"$ref": "#/$defs/folder"}, {"$ref": "#/$defs/file"}]},
        "file": _object({"bytes": {"type": "integer", "minimum": 0}}),
    },
    "$ref": "#/$defs/folder",
}

_INVOICE = _object(
    {
        "number": {"type": "string", "pattern": "^INV-[0-9]{4,6}$"},
        "date": {"type": "string", "format": "date"},
        "customer": _object(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 40},
                "email": {"type": "string", "format": "email"},
                "address": {"anyOf": [_NULL, {"$ref": "#/$defs/address"}]},
            }
        ),
        "lines": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"$ref": "#/$defs/line"}},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "paid": {"type": "boolean"},
    },
    **{
        "$defs": {
            "address": _object({"street": _TEXT, "zip": {"type": "string", "pattern": "^\\d{5}$"}}),
            "line": _object(
                {
                    "text": {"type": "string", "maxLength": 30},
                    "count": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number", "minimum": 0},
                }
            ),
        }
    },
)
_INVOICE_VALUE = {
    "number": "INV-20417",
    "date": "2024-02-29",
    "customer": {
        "name": "Ada",
        "email": "ada@example.org",
        "address": {"street": "Elm 1", "zip": "01099"},
    },
    "lines": [{"text": "rope", "count": 2, "price": 3.5}],
    "currency": "EUR",
    "paid": False,
}

_SHAPES = {
    "oneOf": [
        _object({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
        _object({"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0}}),
    ]
}

SCHEMAS: dict[str, tuple[Schema, Any]] = {
    # ---------------------------------------------------------------------------------- scalars
    "true": (True, {"any": ["thing", 1, None]}),
    "empty": ({}, [1, "two"]),
    "string": (_TEXT, 'Grüße 🍀 "quoted" \\ \n'),
    "integer": (_INTEGER, -120),
    "number": (_NUMBER, -1.25e-3),
    "boolean": ({"type": "boolean"}, True),
    "null": (_NULL, None),
    "union of types": ({"type": ["string", "integer", "null"]}, "text"),
    "enum of strings": ({"enum": ["red", "green", "blue", "re", "r"]}, "re"),
    "enum of all kinds": ({"enum": [1, "1", None, True, {"a": [1]}, [], 2.5]}, {"a": [1]}),
    "enum of odd texts": (
        {"enum": ["ü", "🍀", 'a"b', "c\\d", "line\nbreak", "", "/", "<tag>"]},
        "🍀",
    ),
    "const": ({"const": {"version": 3, "flags": ["a", "b"]}}, {"version": 3, "flags": ["a", "b"]}),
    # ----------------------------------------------------------------------------------- bounds
    "integer bounds": ({"type": "integer", "minimum": -5, "maximum": 120}, 99),
    "integer exclusive bounds": (
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        9,
    ),
    "number bounds": ({"type": "number", "minimum": 0, "maximum": 1}, 0.25),
    "number exclusive bounds": (
        {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.5},
        2.25,
    ),
    "integer multiple": ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}, 995),
    "string length": ({"type": "string", "minLength": 3, "maxLength": 8}, "üöä🍀"),
    "string minimum length": ({"type": "string", "minLength": 2}, "ab"),
    # --------------------------------------------------------------------------------- patterns
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}$"}, "AB-1234"),
    "pattern without anchors": (
        {"type": "string", "pattern": "cat|dog", "maxLength": 20},
        "hotdogs",
    ),
    "pattern with escapes": ({"type": "string", "pattern": '^["\\\\/]{1,4}$'}, '"\\/'),
    "pattern and length": (
        {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 5},
        "abcd",
    ),
    "pattern with classes": (
        {"type": "string", "pattern": "^\\w+@\\w+\\.(com|org)$"},
        "me_1@site.org",
    ),
    # ---------------------------------------------------------------------------------- formats
    "date": ({"type": "string", "format": "date"}, "2024-02-29"),
    "time": ({"type": "string", "format": "time"}, "23:59:59Z"),
    "date-time": ({"type": "string", "format": "date-time"}, "2024-06-01T12:00:00+02:00"),
    "duration": ({"type": "string", "format": "duration"}, "P3DT4H"),
    "email": ({"type": "string", "format": "email"}, "ada@example.org"),
    "uuid": ({"type": "string", "format": "uuid"}, "01234567-89ab-cdef-0123-456789abcdef"),
    "ipv4": ({"type": "string", "format": "ipv4"}, "192.168.0.255"),
    "ipv6": ({"type": "string", "format": "ipv6"}, "2001:db8::1"),
    "hostname": ({"type": "string", "format": "hostname"}, "a-host.example.org"),
    "uri": ({"type": "string", "format": "uri"}, "https://example.org/a?b=c#d"),
    # ----------------------------------------------------------------------------------- arrays
    "array": ({"type": "array", "items": _INTEGER}, [1, 2, 3]),
    "array of anything": ({"type": "array"}, [1, "a", {"b": None}]),
    "array bounds": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        [True, False, True],
    ),
    "array of exact length": (
        {"type": "array", "items": _NULL, "minItems": 3, "maxItems": 3},
        [None] * 3,
    ),
    "empty array": ({"type": "array", "maxItems": 0}, []),
    "tuple": (
        {"type": "array", "prefixItems": [_TEXT, _INTEGER], "items": False, "minItems": 2},
        ["a", 1],
    ),
    "tuple with a tail": (
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": _INTEGER, "minItems": 1},
        [True, 1, 2],
    ),
    "matrix": (
        {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": _NUMBER},
        },
        [[1, 2], [3, 4.5]],
    ),
    # ---------------------------------------------------------------------------------- objects
    "object": ({"type": "object"}, {"a": 1, "b": [{}]}),
    "empty object": ({"type": "object", "additionalProperties": False}, {}),
    "strict object": (_object({"name": _TEXT, "age": _INTEGER}), {"name": "Ada", "age": 36}),
    "optional properties": (
        {
            "type": "object",
            "properties": {"a": _INTEGER, "b": _TEXT, "c": _NULL},
            "additionalProperties": False,
        },
        {"a": 1, "c": None},
    ),
    "required and optional": (
        {
            "type": "object",
            "properties": {"a": _INTEGER, "b": _TEXT},
            "required": ["b"],
            "additionalProperties": False,
        },
        {"b": "x"},
    ),
    "open object": (
        {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
        {"a": 1, "more": "things"},
    ),
    "required without a schema": ({"type": "object", "required": ["x", "y"]}, {"x": 1, "y": [2]}),
    "map": ({"type": "object", "additionalProperties": _NUMBER}, {"a": 1.5, "b": 2}),
    "map of bounded size": (
        {
            "type": "object",
            "additionalProperties": _INTEGER,
            "minProperties": 1,
            "maxProperties": 3,
        },
        {"a": 1, "b": 2},
    ),
    "pattern properties": (
        {
            "type": "object",
            "patternProperties": {"^x-[a-z]+$": _INTEGER},
            "additionalProperties": False,
        },
        {"x-a": 1, "x-bc": 2},
    ),
    "odd property names": (
        _object({"a b": _NULL, 'ü"\\': _NULL, "": _NULL, "$ref-ish": _NULL}),
        {"a b": None, 'ü"\\': None, "": None, "$ref-ish": None},
    ),
    # ------------------------------------------------------------------------------ combinations
    "any of": ({"anyOf": [_INTEGER, {"type": "array", "items": _INTEGER}]}, [1, 2]),
    "any of with a common prefix": (
        {"anyOf": [_object({"a": {"const": 1}}), _object({"a": {"const": 12}, "b": _NULL})]},
        {"a": 12, "b": None},
    ),
    "one of with tags": (_SHAPES, {"kind": "square", "side": 2.5}),
    "one of kinds": ({"oneOf": [_TEXT, _INTEGER, _NULL]}, "s"),
    "all of": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": _TEXT}, "required": ["b"]},
            ]
        },
        {"a": 1, "b": "x"},
    ),
    "all of bounds": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]}, 17),
    "siblings of a reference": (
        {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 9},
        4,
    ),
    "nullable by union": (
        _object(
            {"nick": {"type": ["string", "null"]}, "tags": {"anyOf": [_NULL, {"type": "array"}]}}
        ),
        {"nick": None, "tags": []},
    ),
    # -------------------------------------------------------------------- references, recursion
    "definitions": (
        _object(
            {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
            **{"$defs": {"point": _object({"x": _NUMBER, "y": _NUMBER})}},
        ),
        {"from": {"x": 1, "y": 2}, "to": {"x": 0.5, "y": -1}},
    ),
    "reference by path": (
        _object({"a": {"type": "integer", "minimum": 1}, "b": {"$ref": "#/properties/a"}}),
        {"a": 1, "b": 2},
    ),
    "reference with escapes": (
        {"$defs": {"a/b~c": {"enum": ["yes", "no"]}}, "$ref": "#/$defs/a~1b~0c"},
        "yes",
    ),
    "tree": (_TREE, {"value": 1, "children": [{"value": 2, "children": []}]}),
    "linked list": (_LINKED, {"id": 1, "next": {"id": 2, "next": None}}),
    "expression": (
        _EXPRESSION,
        {"op": "+", "left": 1, "right": {"op": "*", "left": 2, "right": 3.5}},
    ),
    "mutual recursion": (
        _MUTUAL,
        {"name": "/", "entries": [{"bytes": 3}, {"name": "tmp", "entries": []}]},
    ),
    # ------------------------------------------------------------------------------ whole tasks
    "invoice": (_INVOICE, _INVOICE_VALUE),
    "deep": (_nested(30), _nested_value(30)),
    "wide": (_object(_WIDE), _WIDE_VALUE),
    "wide and optional": (
        {"type": "object", "properties": _WIDE, "additionalProperties": False},
        {"field_003": None, "field_004": "x", "field_198": True},
    ),
    "annotations": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/person",
            "title": "Person",
            "description": "someone",
            "examples": [{"age": 3}],
            "$comment": "for tests",
            **_object(
                {
                    "age": {
                        "type": "integer",
                        "description": "years",
                        "default": 3,
                        "deprecated": True,
                    }
                }
            ),
        },
        {"age": 3},
    ),
    "pydantic": (
        {
            "title": "Event",
            "type": "object",
            "properties": {
                "name": {"title": "Name", "type": "string"},
                "level": {"$ref": "#/$defs/Level", "default": "low"},
                "when": {"anyOf": [{"type": "string", "format": "date"}, _NULL], "default": None},
            },
            "required": ["name"],
            "$defs": {"Level": {"enum": ["low", "high"], "title": "Level", "type": "string"}},
            "additionalProperties": False,
        },
        {"name": "fair", "level": "high", "when": "2024-05-01"},
    ),
}
