"""Paths, parts and references of a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from swell.cluster.text.json_types import JsonObject, JsonSchema

Schema = JsonSchema | bool

SCHEMA_KEYS = ("additionalProperties", "additionalItems", "items")
"""Keywords whose value is a schema; `items` may also be a list of schemas."""
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties")
DEFINITIONS = ("$defs", "definitions")

MAX_SHOWN_CHARS = 64


class SchemaError(ValueError):
    """A schema that no grammar can enforce."""


def at(path: str, key: str) -> str:
    """Returns the path of a part, as people write it."""
    return f"{path}.{key}" if path else key


def shown_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def children(node: JsonSchema, path: str) -> Iterator[tuple[str, object]]:
    """Yields path and schema of each part of a node that is a schema itself, except definitions."""
    for key in SCHEMA_KEYS:
        value = node.get(key)
        if isinstance(value, list) and key == "items":
            yield from ((f"{at(path, key)}[{i}]", one) for i, one in enumerate(value))
        elif key in node:
            yield at(path, key), value
    for key in SCHEMA_LISTS:
        for index, one in enumerate(listed(node, key, path)):
            yield f"{at(path, key)}[{index}]", one
    for key in SCHEMA_MAPS:
        for name, one in mapped(node, key, path).items():
            yield at(at(path, key), name), one


def listed(node: JsonSchema, key: str, path: str) -> list[Any]:
    found: list[Any] = _typed(node, key, path, list, "a list")
    return found


def mapped(node: JsonSchema, key: str, path: str) -> JsonSchema:
    found: JsonSchema = _typed(node, key, path, dict, "an object")
    return found


def _typed(node: JsonSchema, key: str, path: str, kind: type, name: str) -> Any:
    value = node.get(key, kind())
    if not isinstance(value, kind):
        raise SchemaError(f"has {at(path, key)}={shown_value(value)}, which must be {name}")
    return value


def checked(node: Any, path: str) -> Schema:
    if not isinstance(node, dict | bool):
        place = f"at {path} " if path else ""
        raise SchemaError(
            f"has {place}{shown_value(node)}, which is not a schema; a schema is an object or true"
        )
    return node


class References:
    """Resolves the references of a schema. All must point into the schema itself."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        own = root.get("$id")
        self._id = own.rstrip("#") if isinstance(own, str) else ""
        self._anchors: JsonObject | None = None

    def resolve(self, reference: Any, path: str) -> tuple[tuple[str, ...], Schema]:
        """Resolves `reference`, which is at `path`. Returns the steps to its target, and the schema
        there. An anchor is one step that begins with `#`."""
        if not isinstance(reference, str):
            raise SchemaError(f"has {path}={shown_value(reference)}, which must be a string")
        where = reference.removeprefix(self._id)
        pointer = unquote(where.removeprefix("#"))
        if where and not where.startswith("#"):
            raise SchemaError(f"refers to {shown_value(reference)}, which is not inside it")
        if pointer and not pointer.startswith("/"):
            return (f"#{pointer}",), checked(self._anchor(pointer), path)
        node: Any = self._root
        steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
        for name in steps:
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, TypeError, ValueError):
                raise SchemaError(
                    f"refers at {path} to {pointer!r}, which does not exist"
                ) from None
        return tuple(steps), checked(node, path)

    def _anchor(self, name: str) -> Any:
        if self._anchors is None:
            self._anchors = {}
            nodes: list[Any] = [self._root]
            while nodes:
                node = nodes.pop()
                nodes += node.values() if isinstance(node, dict) else ()
                nodes += node if isinstance(node, list) else ()
                if isinstance(node, dict) and isinstance(node.get("$anchor"), str):
                    self._anchors[node["$anchor"]] = node
        if name not in self._anchors:
            raise SchemaError(f"refers to the anchor {shown_value(name)}, which does not exist")
        return self._anchors[name]
