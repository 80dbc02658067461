"""Merges the object schemas of one place: known names, names that match a pattern, and all
others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from swell.cluster.text.json_grammar.schema_nodes import SchemaError, mapped
from swell.cluster.text.json_grammar.schema_values import bounds
from swell.cluster.text.json_grammar.string_patterns import search_expression

Node = dict[str, Any]
MakePlace = Callable[..., Any]

MAX_PROPERTIES = 10_000
NAME = r'/"([^"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u00[01][0-9a-f]|u007f))*"/'
"""A name in its quotes, written in the only way that is allowed."""
_PLAIN_NAME = r'/"[^"\\\x00-\x1F\x7F]*"/'
"""A name without escapes: a pattern then matches exactly what is written."""


class Others(msgspec.Struct, frozen=True):
    """Properties that are not known by name."""

    name: str | None
    """The terminal expression of a name in its quotes; None for any name."""
    place: Any


class ObjectShape(msgspec.Struct, frozen=True):
    properties: dict[str, Any]
    """Maps a name to its place, in the order in which they are written."""
    required: frozenset[str]
    others: list[Others]
    least: int
    most: int | None

    def value_of(self, name: str) -> Any:
        """Returns the place of a property, as far as known names decide it."""
        if name in self.properties:
            return self.properties[name]
        return () if self.others else None


def merge_objects(
    nodes: list[Node], place: MakePlace, is_empty: Callable[[str], bool]
) -> list[ObjectShape]:
    """Returns the objects that fit all nodes; empty if none does."""
    merged = [_OneSchema(node) for node in nodes]
    required: dict[str, None] = {}
    for node in nodes:
        required |= dict.fromkeys(node.get("required", []))
    names = dict.fromkeys(name for one in merged for name in one.properties)
    names |= dict.fromkeys(required)
    patterns = dict.fromkeys(pattern for one in merged for pattern in one.patterns)
    if len(names) > MAX_PROPERTIES:
        raise SchemaError(f"has {len(names)} properties; at most {MAX_PROPERTIES} can be held")
    matched = {
        pattern: {name for name in names if _is_found(pattern, name, is_empty)}
        for pattern in patterns
    }
    properties = {
        name: place(*(schema for one in merged for schema in one.schemas(name, matched)))
        for name in names
    }
    if any(properties[name] is None for name in required):
        return []
    properties = {name: one for name, one in properties.items() if one is not None}
    others = _others(merged, [*names], [*patterns], place, is_empty)
    least, most = bounds(nodes, "minProperties", "maxProperties")
    return [ObjectShape(properties, frozenset(required), others, least, most)]


class _OneSchema:
    """The properties of one schema."""

    def __init__(self, node: Node) -> None:
        self.properties: dict[str, Any] = dict(mapped(node, "properties", ""))
        self.patterns: dict[str, Any] = dict(mapped(node, "patternProperties", ""))
        self.additional = node.get("additionalProperties", True)

    def schemas(self, name: str, matched: dict[str, set[str]]) -> list[Any]:
        """Returns the schemas of the property with this name."""
        found = [self.properties[name]] if name in self.properties else []
        found += [schema for pattern, schema in self.patterns.items() if name in matched[pattern]]
        return found or [self.additional]


def _is_found(pattern: str, name: str, is_empty: Callable[[str], bool]) -> bool:
    """Returns whether a name matches a pattern. The library decides, in a process that has
    limits."""
    if json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise SchemaError(f"has patternProperties beside the property {name!r}, which has escapes")
    return not is_empty(f"{_text(name)} & {_name_of(pattern)}")


def _name_of(pattern: str) -> str:
    try:
        return f'/"{search_expression(pattern)}"/'
    except ValueError as error:
        raise SchemaError(f"patternProperties {error}") from None


def _text(name: str) -> str:
    """Returns the expression of a name in its quotes."""
    return literal(json.dumps(name, ensure_ascii=False))


def literal(text: str) -> str:
    """Returns a text in Lark's notation: JSON does not escape DEL, but Lark must."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def _others(
    merged: list[_OneSchema],
    names: list[str],
    patterns: list[str],
    place: MakePlace,
    is_empty: Callable[[str], bool],
) -> list[Others]:
    known = f" & ~({' | '.join(map(_text, names))})" if names else ""
    found = []
    for index, pattern in enumerate(patterns):
        schemas = [one.patterns.get(pattern, one.additional) for one in merged]
        target = place(*schemas)
        name = f"{_PLAIN_NAME} & {_name_of(pattern)}{known}"
        if target is None or is_empty(name):
            continue
        for other in patterns[:index]:
            if not is_empty(f"{name} & {_name_of(other)}"):
                raise SchemaError(
                    f"has the patterns {other!r} and {pattern!r} in patternProperties, and a name "
                    "may match both; write patterns that exclude each other"
                )
        found.append(Others(name, target))
    target = place(*(one.additional for one in merged))
    if target is not None:
        none = "".join(f" & ~{_name_of(pattern)}" for pattern in patterns)
        plain = _PLAIN_NAME if patterns else NAME
        name = f"{plain}{known}{none}" if known or none else ""
        if not name or not patterns or not is_empty(name):
            found.append(Others(name or None, target))
    return found
