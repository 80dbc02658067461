"""Converts values that a model writes as text to JSON, according to the schema of a parameter.

    <parameter=n>3</parameter>         {"type": "integer"}              3
    <parameter=s>3</parameter>         {"type": "string"}               "3"
    <parameter=x>null</parameter>      {"type": ["string", "null"]}     null
    <parameter=x>nulls</parameter>     {"type": ["string", "null"]}     "nulls"

A text that is a JSON value becomes that value if the schema allows its type, or does not allow
strings; otherwise it becomes a string. If nothing is known of a parameter, all types are allowed.
"""

from __future__ import annotations

import json
from typing import Any

from swell.cluster.text.exact_numbers import ExactFloat
from swell.cluster.text.json_types import JsonObject, JsonSchema, JsonValue
from swell.cluster.text.parsers.notations.json_check import JSON_TYPES, PYTHON_WORDS, JsonChecker

STRING = frozenset(("string",))
MAX_SCHEMA_NODES = 256
"""Limit on schemas read for the types of one parameter: references may multiply endlessly."""

_TYPES = {kind: frozenset((kind,)) for kind in JSON_TYPES}
_TYPES["integer"] = _TYPES["float"] = _TYPES["number"]
_encode = json.JSONEncoder(ensure_ascii=False).encode
_PYTHON_TYPES: dict[type, str] = {str: "string", bool: "boolean", list: "array", dict: "object"}
_PYTHON_TYPES |= {int: "number", float: "number", ExactFloat: "number", type(None): "null"}


def json_escaped(text: str) -> str:
    """Escapes a text, character by character, as in a JSON string."""
    return _encode(text)[1:-1]


class TypedText:
    """Converts one value while it streams. A string is output at once. Any other value is output
    when it is complete, or as a string from the character on that makes the text a string."""

    def __init__(self, types: frozenset[str]) -> None:
        """`types` are the types that the value may have."""
        others = types - STRING
        self._checker = None
        if others:
            self._checker = JsonChecker(
                others if "string" in types and types != JSON_TYPES else JSON_TYPES
            )
        self._held: list[str] = []
        self._begun = False

    @property
    def in_json(self) -> bool:
        """Whether the next character is in a string of an array or object."""
        return self._checker is not None and self._checker.in_string

    def push(self, text: str) -> str:
        """Adds text; returns the JSON that is certain now."""
        if self._checker is None:
            return self._opened() + json_escaped(text)
        self._held.append(text)
        self._checker.read(text)
        if not self._checker.ended:
            return ""
        return self._as_string()

    def end(self) -> str:
        """Ends the text; returns the rest of the JSON."""
        if self._checker is None or not self._checker.whole:
            return self._as_string() + '"'
        text = "".join(self._held).strip()
        return PYTHON_WORDS.get(text, text)

    def flush(self) -> str:
        """Ends an answer within the value; returns its incomplete text."""
        return "".join(self._held)

    def _opened(self) -> str:
        begun, self._begun = self._begun, True
        return "" if begun else '"'

    def _as_string(self) -> str:
        self._checker = None
        held, self._held = "".join(self._held), []
        return self._opened() + json_escaped(held)


def parameter_types(parameters: JsonObject, key: str) -> frozenset[str]:
    """Returns the types that a tool's schema allows for one of its arguments."""
    properties, schema = parameters.get("properties"), parameters.get("additionalProperties", True)
    if isinstance(properties, dict) and key in properties:
        schema = properties[key]
    return schema_types(schema, parameters)


def schema_types(schema: Any, root: JsonSchema) -> frozenset[str]:
    """Returns the types of values that a schema allows; its references point into `root`."""
    return _SchemaTypes(root).of(schema)


class _SchemaTypes:
    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._nodes_left = MAX_SCHEMA_NODES

    def of(self, schema: Any) -> frozenset[str]:
        self._nodes_left -= 1
        if not isinstance(schema, dict) or self._nodes_left < 0:
            return JSON_TYPES
        types = _named(schema.get("type")) & self._of_values(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            types &= self.of(resolve(reference, self._root))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list) and options:
                types &= frozenset().union(*map(self.of, options))
        if isinstance(schemas := schema.get("allOf"), list):
            for one in schemas:
                types &= self.of(one)
        return types or JSON_TYPES

    @staticmethod
    def _of_values(schema: JsonObject) -> frozenset[str]:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return JSON_TYPES
        return frozenset(_PYTHON_TYPES.get(type(value), "string") for value in values)


def _named(names: JsonValue) -> frozenset[str]:
    listed = names if isinstance(names, list) else [names]
    known = [
        _TYPES.get(name, JSON_TYPES) if isinstance(name, str) else JSON_TYPES for name in listed
    ]
    return frozenset().union(*known)


def resolve(reference: str, root: JsonSchema) -> Any:
    """Returns the target of a reference such as `#/$defs/Place`; None if it does not exist."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node
