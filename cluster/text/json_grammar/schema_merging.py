"""Merges all schemas of one place into alternatives, each for one kind of value.

A *place* is a value in an answer. Several schemas may apply to it: those of `allOf`, of a reference
and its siblings, of a property and of the pattern that its name matches. Merged, they are a list of
*shapes*, and any of these may be written there. A shape is a scalar, an array, an object, or
another place if a schema has `anyOf`. The parts of a shape are places again, so a schema that
refers to itself leads to a place that was met before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from swell.cluster.text.json_grammar.number_ranges import NumberRange
from swell.cluster.text.json_grammar.object_merging import ObjectShape, merge_objects
from swell.cluster.text.json_grammar.schema_keywords import CLEANED
from swell.cluster.text.json_grammar.schema_nodes import (
    DEFINITIONS,
    References,
    Schema,
    SchemaError,
    at,
    checked,
    children,
    listed,
)
from swell.cluster.text.json_grammar.schema_values import (
    allowed_kinds,
    allowed_values,
    bounds,
    decimal_of,
    kind_of,
    number_range,
)
from swell.cluster.text.json_grammar.string_terminals import string_rule
from swell.cluster.text.json_types import JsonSchema

Place = tuple[JsonSchema, ...] | None
"""Schemas that apply to one value; None if no value fits. Nodes are compared by identity."""

_CHOICES = ("anyOf", "oneOf")
_NUMBER_KEYWORDS = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)
_CONSTRAINTS = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *_NUMBER_KEYWORDS,
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required"),
        *("minProperties", "maxProperties"),
    )
)
_STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
MAX_SCHEMAS = 500
"""Limit on the schemas that apply to one value."""
MAX_MERGED = 100_000
"""Limit on the schemas read in total, each counted as often as it is combined with others: this
takes half a second."""
MAX_PROBES = 500
"""Limit on comparisons of a name or a pattern with a pattern: each takes a millisecond."""
MAX_PROBES_S = 10.0
"""Limit on the time of all comparisons, on a busy machine; a hostile pattern takes half a second
each time."""


class LiteralShape(msgspec.Struct, frozen=True):
    texts: list[str]
    """JSON texts of null, true and false."""


class NumberShape(msgspec.Struct, frozen=True):
    numbers: NumberRange
    path: str = ""
    """The path of a schema that constrains the number."""


class StringShape(msgspec.Struct, frozen=True):
    expression: str
    is_terminal: bool
    """Whether the expression is that of a terminal, not of a rule."""
    texts: list[str] | None
    """The only allowed texts; None for any."""


class ArrayShape(msgspec.Struct, frozen=True):
    prefix: list[Place]
    items: Place
    """The place of the items after the prefix."""
    least: int
    most: int | None


class PlaceShape(msgspec.Struct, frozen=True):
    place: Place


Shape = LiteralShape | NumberShape | StringShape | ArrayShape | ObjectShape | PlaceShape


class SchemaMerger:
    """Merges the parts of one cleaned schema (see `schema_keywords.py`)."""

    def __init__(self, root: JsonSchema, is_empty: Callable[[str], bool]) -> None:
        """`is_empty` returns whether no text matches the expression of a terminal."""
        self._references = References(root)
        self._num_probes = self._num_merged = 0
        self._probes_s = 0.0
        self.one_ofs: list[tuple[str, list[Place]]] = []
        """Path and places of each `oneOf` that has not been checked yet."""
        self._paths = _paths_of(root)
        self._probe = is_empty
        self._shapes: dict[tuple[int, ...], list[Shape]] = {}
        self.reasons: list[str] = []
        """Reasons why some kinds of values are not allowed."""
        self._kept: dict[int, JsonSchema] = {}
        """Nodes by their address. This keeps them alive, since they are compared by address."""
        self._derived: dict[tuple[int, tuple[str, ...]], JsonSchema] = {}

    def place(self, *schemas: Schema) -> Place:
        """Returns the place to which these schemas apply. Schemas that constrain nothing are left
        out."""
        found: dict[int, JsonSchema] = {}
        for schema in schemas:
            node = checked(schema, "")
            if node is False:
                return None
            if isinstance(node, dict) and _CONSTRAINTS & set(node):
                found[id(node)] = self._kept[id(node)] = node
            elif isinstance(node, dict) and CLEANED & set(node):
                self._check(node)
        return tuple(found.values())

    def shapes(self, place: Place) -> list[Shape]:
        """Returns the shapes that may be written at a place; empty if there are none."""
        if place is None:
            return []
        key = tuple(map(id, place))
        if key not in self._shapes:
            self._shapes[key] = self._merge(place)
        return self._shapes[key]

    def _is_empty(self, expression: str) -> bool:
        if self._num_probes == MAX_PROBES or self._probes_s > MAX_PROBES_S:
            raise SchemaError(
                f"needs more than {MAX_PROBES} comparisons of patterns with names, or more than "
                f"{MAX_PROBES_S:g} s for them; use fewer or shorter patterns"
            )
        self._num_probes += 1
        begun_s = time.monotonic()
        try:
            return self._probe(expression)
        finally:
            self._probes_s += time.monotonic() - begun_s

    def _merge(self, place: Place) -> list[Shape]:
        nodes = self._flatten(place)
        if nodes is None:
            return []
        for node in nodes:
            for keyword in _CHOICES:
                if keyword in node:
                    return self._choose(nodes, node, keyword)
        return self._of_kinds(nodes)

    def _drop(self, nodes: list[JsonSchema], reason: str) -> None:
        """Stores why a place lost a kind of value, for the error if no kind remains."""
        path = self._path_of(nodes)
        self.reasons.append(f"{reason}{f' at {path}' if path else ''}")

    def _path_of(self, nodes: list[JsonSchema]) -> str:
        """Returns the path of the first node that has one."""
        return next((self._paths[id(node)] for node in nodes if id(node) in self._paths), "")

    def _check(self, node: JsonSchema) -> None:
        for keyword in sorted(CLEANED & set(node)):
            raise SchemaError(f"refers to a part that has {keyword!r}; move this part to $defs")

    def _without(self, node: JsonSchema, *keywords: str) -> JsonSchema:
        key = (id(node), keywords)
        if key not in self._derived:
            self._kept[id(node)] = node
            rest = {name: value for name, value in node.items() if name not in keywords}
            self._derived[key] = rest
            self._paths[id(rest)] = self._paths.get(id(node), "")
        return self._derived[key]

    def _flatten(self, place: Place) -> list[JsonSchema] | None:
        """Returns the same schemas with references and `allOf` resolved; None if no value fits."""
        if place is None:
            return None
        found: dict[int, JsonSchema] = {}
        seen: set[int] = set()
        waiting: deque[Schema] = deque(place)
        while waiting:
            node = waiting.popleft()
            if node is False:
                return None
            if not isinstance(node, dict) or id(node) in seen:
                continue
            self._check(node)
            seen.add(id(node))
            self._num_merged += 1
            if len(seen) > MAX_SCHEMAS or self._num_merged > MAX_MERGED:
                raise SchemaError(
                    f"has more than {MAX_SCHEMAS} schemas for one value, or more than "
                    f"{MAX_MERGED} combinations of allOf and anyOf; use fewer alternatives"
                )
            self._kept[id(node)] = node
            rest = self._without(node, "$ref", "allOf") if {"$ref", "allOf"} & set(node) else node
            if _CONSTRAINTS & set(rest):
                found[id(rest)] = rest
            waiting.extend(checked(one, "allOf") for one in listed(node, "allOf", ""))
            if "$ref" in node:
                waiting.append(self._references.resolve(node["$ref"], "$ref")[1])
        return list(found.values())

    def _choose(self, nodes: list[JsonSchema], node: JsonSchema, keyword: str) -> list[Shape]:
        rest = [self._without(one, keyword) if one is node else one for one in nodes]
        options = [self.place(*rest, option) for option in listed(node, keyword, "")]
        if keyword == "oneOf":
            self.one_ofs.append((at(self._paths.get(id(node), ""), "oneOf"), options))
        texts = [plain_texts(option) for option in options]
        if texts and all(one is not None for one in texts):
            # One rule instead of one for each text.
            return self._strings(
                nodes, [], [*dict.fromkeys(text for one in texts for text in one or ())]
            )
        return [PlaceShape(option) for option in options if option is not None]

    def _of_kinds(self, nodes: list[JsonSchema]) -> list[Shape]:
        kinds, is_integer = allowed_kinds(nodes)
        values = allowed_values(nodes)
        numbers = NumberRange(integer=is_integer)
        if "number" in kinds:
            for node in nodes:
                numbers = numbers.intersect(number_range(node))
        limits = [
            limit
            for node in nodes
            if (limit := {key: node[key] for key in _STRING_KEYWORDS if key in node})
        ]
        if values is not None:
            return self._of_values(nodes, values, kinds, numbers, limits)
        shapes: list[Shape] = []
        literals = ["null"] if "null" in kinds else []
        literals += ["true", "false"] if "boolean" in kinds else []
        if literals:
            shapes.append(LiteralShape(literals))
        if "number" in kinds and numbers.is_empty:
            self._drop(nodes, f"no number is {numbers}")
        elif "number" in kinds:
            limiting = [node for node in nodes if _NUMBER_KEYWORDS & set(node)]
            shapes.append(NumberShape(numbers, self._path_of(limiting)))
        if "string" in kinds:
            shapes += self._strings(nodes, limits, None)
        if "array" in kinds and (array := self._array(nodes)) is not None:
            shapes.append(array)
        if "object" in kinds:
            shapes += merge_objects(nodes, self.place, self._is_empty)
        return shapes

    def _of_values(
        self,
        nodes: list[JsonSchema],
        values: list[Any],
        kinds: set[str],
        numbers: NumberRange,
        limits: list[JsonSchema],
    ) -> list[Shape]:
        literals: list[str] = []
        texts: list[str] = []
        shapes: list[Shape] = []
        rest = [self._without(node, "const", "enum") for node in nodes]
        for value in values:
            kind = kind_of(value)
            if kind not in kinds:
                continue
            if kind == "number":
                number = decimal_of(value)
                if numbers.contains(number):
                    shapes.append(NumberShape(NumberRange(number, False, number, False)))
            elif kind == "string":
                texts.append(value)
            elif kind in ("array", "object"):
                shapes.append(PlaceShape(self.place(*rest, self._fixed(value))))
            else:
                literals.append("null" if value is None else str(value).lower())
        if literals:
            shapes.append(LiteralShape(literals))
        return shapes + (self._strings(nodes, limits, texts) if texts else [])

    def _strings(
        self, nodes: list[JsonSchema], limits: list[JsonSchema], texts: list[str] | None
    ) -> list[Shape]:
        least, most = bounds(limits, "minLength", "maxLength")
        if texts is not None:
            texts = [
                one for one in texts if least <= len(one) and (most is None or len(one) <= most)
            ]
        if most is not None and least > most:
            self._drop(nodes, f"minLength={least} is more than maxLength={most}")
            return []
        if texts == []:
            return []
        expression, is_terminal = string_rule(limits, texts)
        if self._is_empty_string(expression, is_terminal, limits, texts):
            self._drop(nodes, "no string has this pattern, length, format and value")
            return []
        return [StringShape(expression, is_terminal, texts)]

    def _is_empty_string(
        self, expression: str, is_terminal: bool, limits: list[JsonSchema], texts: list[str] | None
    ) -> bool:
        if is_terminal:
            return self._is_empty(expression)
        keywords = [keyword for limit in limits for keyword in limit]
        is_combined = len(keywords) + (texts is not None) > 1
        if not is_combined or not {"pattern", "format"} & set(keywords):
            return False
        # Half of the comparisons are for names. Without one, the whole schema may be refused.
        is_cheap = self._num_probes < MAX_PROBES // 2 and self._probes_s < MAX_PROBES_S / 2
        return is_cheap and self._is_empty(expression)

    def _fixed(self, value: Any) -> JsonSchema:
        """Returns the schema of an array or object with exactly these parts."""
        key = (id(value), ("const",))
        if key not in self._derived:
            self._kept[id(value)] = value
            if isinstance(value, list):
                size = len(value)
                parts = [{"const": one} for one in value]
                node: JsonSchema = {"prefixItems": parts, "items": False}
                node |= {"type": "array", "minItems": size, "maxItems": size}
            else:
                node = {"properties": {name: {"const": one} for name, one in value.items()}}
                node |= {"type": "object", "required": [*value], "additionalProperties": False}
            self._derived[key] = node
        return self._derived[key]

    def _array(self, nodes: list[JsonSchema]) -> ArrayShape | None:
        prefixes, tails = [], []
        for node in nodes:
            prefix, tail = node.get("prefixItems", []), node.get("items", True)
            if isinstance(tail, list):
                prefix, tail = tail, node.get("additionalItems", True)
            prefixes.append(prefix)
            tails.append(tail)
        length = max(map(len, prefixes), default=0)
        places = [
            self.place(
                *(
                    prefix[index] if index < len(prefix) else tail
                    for prefix, tail in zip(prefixes, tails, strict=True)
                )
            )
            for index in range(length)
        ]
        least, most = bounds(nodes, "minItems", "maxItems")
        if most is not None and least > most:
            self._drop(nodes, f"minItems={least} is more than maxItems={most}")
            return None
        return ArrayShape(places, self.place(*tails), least, most)


def plain_texts(place: Place) -> list[str] | None:
    """Returns the texts of a place with one schema that only lists texts; None for other places."""
    if place is None or len(place) != 1 or _CONSTRAINTS & set(place[0]) - {"const", "enum", "type"}:
        return None
    values = allowed_values([*place])
    if not values or not all(isinstance(value, str) for value in values):
        return None
    return values if "string" in allowed_kinds([*place])[0] else None


def _paths_of(root: JsonSchema) -> dict[int, str]:
    """Maps the address of each schema to its path."""
    found: dict[int, str] = {}
    level: list[tuple[str, Any]] = [("", root)]
    for key in DEFINITIONS:
        level += [(at(key, name), one) for name, one in root.get(key, {}).items()]
    while level:
        path, node = level.pop()
        if isinstance(node, dict):
            found[id(node)] = path
            level += children(node, path)
    return found
