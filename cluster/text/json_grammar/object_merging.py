"""Merges the object schemas of one place: known names, names that match a pattern, and all
others."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from swell.cluster.text.json_grammar.schema_nodes import SchemaError, mapped
from swell.cluster.text.json_grammar.schema_values import bounds
from swell.cluster.text.json_grammar.string_patterns import search_expression
from swell.cluster.text.json_types import JsonSchema

MakePlace = Callable[..., Any]

MAX_PROPERTIES = 10_000
MAX_NAME_PARTS = 32
"""Limit on the sets of patterns that a name may match. Each overlapping pattern may double them."""
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
    properties: JsonSchema
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
    nodes: list[JsonSchema], place: MakePlace, is_empty: Callable[[str], bool]
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
        raise SchemaError(f"has {len(names)} properties; at most {MAX_PROPERTIES} are allowed")
    properties = {}
    for name in names:
        matched = {pattern for pattern in patterns if _is_found(pattern, name, is_empty)}
        schemas = (schema for one in merged for schema in one.schemas(name, matched))
        properties[name] = place(*schemas)
    if any(properties[name] is None for name in required):
        return []
    properties = {name: one for name, one in properties.items() if one is not None}
    others = _others(merged, [*names], [*patterns], place, is_empty)
    least, most = bounds(nodes, "minProperties", "maxProperties")
    return [ObjectShape(properties, frozenset(required), others, least, most)]


class _OneSchema:
    """The properties of one schema."""

    def __init__(self, node: JsonSchema) -> None:
        self.properties: JsonSchema = dict(mapped(node, "properties", ""))
        self.patterns: JsonSchema = dict(mapped(node, "patternProperties", ""))
        self.additional = node.get("additionalProperties", True)

    def schemas(self, name: str | None, matched: Collection[str]) -> list[Any]:
        """Returns the schemas of the property with this name, which matches the patterns in
        `matched`. `name` is None for a name that is in no schema."""
        found = [self.properties[name]] if name in self.properties else []
        found += [schema for pattern, schema in self.patterns.items() if pattern in matched]
        return found or [self.additional]


def _is_found(pattern: str, name: str, is_empty: Callable[[str], bool]) -> bool:
    """Returns whether a name matches a pattern. The library decides, in a process that has
    limits."""
    if json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise SchemaError(
            f"has patternProperties together with the property {name!r}, whose name needs escapes"
        )
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
    if not patterns:
        target = place(*(one.additional for one in merged))
        return [] if target is None else [Others(f"{NAME}{known}" if known else None, target)]
    found: dict[tuple[int, ...], tuple[Any, list[str]]] = {}
    for name, matched in _split_names(f"{_PLAIN_NAME}{known}", patterns, is_empty):
        target = place(*(schema for one in merged for schema in one.schemas(None, matched)))
        if target is not None:
            found.setdefault(tuple(map(id, target)), (target, []))[1].append(name)
    return [
        Others(parts[0] if len(parts) == 1 else " | ".join(f"({one})" for one in parts), target)
        for target, parts in found.values()
    ]


def _split_names(
    name: str, patterns: list[str], is_empty: Callable[[str], bool]
) -> list[tuple[str, list[str]]]:
    """Splits the names that an expression matches into parts that exclude each other. Returns the
    expression of each part, with all patterns that its names match."""
    parts: list[tuple[str, list[str]]] = [] if is_empty(name) else [(name, [])]
    for pattern in patterns:
        split = []
        for part, matched in parts:
            inside = f"{part} & {_name_of(pattern)}"
            if is_empty(inside):
                split.append((part, matched))
                continue
            split.append((inside, [*matched, pattern]))
            outside = f"{part} & ~{_name_of(pattern)}"
            if not is_empty(outside):
                split.append((outside, matched))
        parts = split
        if len(parts) > MAX_NAME_PARTS:
            raise SchemaError(
                f"has {len(patterns)} patterns for the names of one object, which overlap in more "
                f"than {MAX_NAME_PARTS} ways; use fewer patterns, or patterns that exclude each "
                "other"
            )
    return parts
