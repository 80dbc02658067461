"""The properties that a schema evaluates: its `unevaluatedProperties` applies to all others.

The schemas of `allOf` and `$ref` apply to every object, so the properties that they name are
evaluated. `propertyNames` evaluates none. A schema of `anyOf` applies to some objects only: the
evaluated properties then depend on the object, unless it names only properties that are evaluated
in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from swell.cluster.text.json_grammar.schema_nodes import (
    References,
    SchemaError,
    at,
    checked,
    listed,
    mapped,
)
from swell.cluster.text.json_types import JsonSchema

_CHOICES = ("anyOf", "oneOf")
_BRANCHES = ("if", "then", "else")
_UNKNOWN = ("$dynamicRef", "$recursiveRef", "dependencies")
_MAX_SCHEMAS = 500


class EvaluatedProperties(msgspec.Struct):
    names: dict[str, None]
    patterns: dict[str, None]
    are_all: bool = False
    num_schemas: int = 0
    """Number of schemas that were read."""

    def has(self, other: EvaluatedProperties) -> bool:
        """Returns whether everything that `other` evaluates is evaluated here."""
        if self.are_all or other.are_all:
            return self.are_all
        return not (other.names.keys() - self.names or other.patterns.keys() - self.patterns)


def evaluated_properties(
    node: JsonSchema, references: References, path: str
) -> EvaluatedProperties | None:
    """Returns the properties that all keywords of a node evaluate, except for its own
    `unevaluatedProperties`. Returns None if they depend on the object."""
    own = {key: value for key, value in node.items() if key != "unevaluatedProperties"}
    always, choices = _read([own], references, path, into_choices=False)
    perhaps, _ = _read(choices, references, path, into_choices=True)
    always.num_schemas += perhaps.num_schemas
    return always if always.has(perhaps) else None


def _read(
    schemas: Iterable[object], references: References, path: str, *, into_choices: bool
) -> tuple[EvaluatedProperties, list[object]]:
    """Returns the properties that the schemas evaluate together, and the parts of the schemas that
    apply to some objects only. `into_choices` includes their properties."""
    found = EvaluatedProperties({}, {})
    choices: list[object] = []
    waiting, seen = [*schemas], set[int]()
    while waiting:
        node = checked(waiting.pop(), path)
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if len(seen) > _MAX_SCHEMAS:
            raise SchemaError(
                f"has more than {_MAX_SCHEMAS} schemas next to "
                f"{at(path, 'unevaluatedProperties')}; use fewer"
            )
        found.names |= dict.fromkeys(mapped(node, "properties", path))
        found.patterns |= dict.fromkeys(mapped(node, "patternProperties", path))
        others = (node.get(f"{kind}Properties", False) for kind in ("additional", "unevaluated"))
        found.are_all |= any(other is not False for other in others)
        found.are_all |= into_choices and any(keyword in node for keyword in _UNKNOWN)
        waiting += listed(node, "allOf", path)
        if "$ref" in node:
            waiting.append(references.resolve(node["$ref"], at(path, "$ref"))[1])
        (waiting if into_choices else choices).extend(_choices(node, path))
    found.num_schemas = len(seen)
    return found, choices


def _choices(node: JsonSchema, path: str) -> Iterator[object]:
    for key in _CHOICES:
        yield from listed(node, key, path)
    yield from (node[key] for key in _BRANCHES if key in node)
    yield from mapped(node, "dependentSchemas", path).values()
    yield from ({key: node[key]} for key in _UNKNOWN if key in node)
