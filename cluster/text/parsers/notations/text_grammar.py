"""Grammars, in llguidance's Lark syntax, of strings that are plain text in an answer: the
constraints of a JSON schema, and texts that must not occur in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from swell.cluster.text.grammar.lark_compiler import is_empty_terminal
from swell.cluster.text.json_grammar.object_merging import literal
from swell.cluster.text.json_grammar.schema_values import allowed_values, is_of_type
from swell.cluster.text.json_grammar.string_patterns import search_expression
from swell.cluster.text.json_types import JsonObject, JsonSchema
from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.notations.json_check import JSON_TYPES, JsonChecker
from swell.cluster.text.parsers.notations.typed_text import (
    MAX_SCHEMA_NODES,
    STRING,
    resolve,
    schema_types,
)

_Kind = TypeVar("_Kind")

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment"),
    )
)
"""Keywords that constrain nothing."""
DEFINITIONS = frozenset(("$defs", "definitions"))
OBJECT_KEYWORDS = frozenset(("type", "properties", "required", "additionalProperties"))
"""Keywords that the grammars of arguments enforce themselves."""
MAX_LENGTH = 100_000
"""The largest `maxLength` of a string that is enforced."""

_LOOKALIKES = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "number": r"-?[0-9][-+.0-9eE]*",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
    "string": r'"(?s:.*)',
}
"""Text that may be read as a value of another kind."""

_DATE, _TIME = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    (r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])"),
)
_HEX = "[0-9a-fA-F]"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "ipv4": r"((25[0-5]|(2[0-4]|1?[0-9])?[0-9])\.){3}(25[0-5]|(2[0-4]|1?[0-9])?[0-9])",
}
"""Regular expressions of formats. Other formats do not constrain the text, as JSON schema
allows."""

_TEXT_KEYWORDS = frozenset(("minLength", "maxLength", "pattern", "format"))
_LISTS = frozenset(("const", "enum"))
_OTHER_KEYWORDS = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    )
)
"""Keywords that do not constrain strings."""


def split_schema(schema: Any, root: JsonSchema) -> tuple[list[JsonSchema], Any]:
    """Returns the schemas of the strings that a schema allows, and the schema of its other values,
    or None if it allows no others. Raises ValueError for a schema that cannot be split."""
    return _Splitter(root).split(schema)


class _Splitter:
    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._nodes_left = MAX_SCHEMA_NODES

    def split(self, schema: Any) -> tuple[list[JsonSchema], Any]:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise ValueError(f"has more than {MAX_SCHEMA_NODES} alternatives, or refers to itself")
        types = schema_types(schema, self._root)
        if not types & STRING:
            return [], schema
        if not isinstance(schema, dict):
            return [{}], {"type": sorted(JSON_TYPES - STRING)}
        keywords = set(schema) - ANNOTATIONS
        if keywords == {"$ref"}:
            return self.split(resolve(field(schema, "$ref", str), self._root))
        if keywords == {"allOf"} and len(field(schema, "allOf", list)) == 1:
            return self.split(schema["allOf"][0])
        if keywords in ({"anyOf"}, {"oneOf"}):
            return self._split_options(schema, keywords.pop())
        if keywords & {"anyOf", "oneOf", "allOf", "$ref"}:
            raise ValueError("combines anyOf, oneOf, allOf or $ref with other keywords")
        return _split_plain(schema, types)

    def _split_options(self, schema: JsonSchema, keyword: str) -> tuple[list[JsonSchema], object]:
        parts = [self.split(option) for option in field(schema, keyword, list)]
        others = [other for _, other in parts if other is not None]
        return [one for texts, _ in parts for one in texts], {keyword: others} if others else None


def field(
    schema: JsonSchema, keyword: str, kind: type[_Kind], default: _Kind | None = None
) -> _Kind:
    """Returns the value of a keyword. Raises ValueError for a value of the wrong kind."""
    value = schema.get(keyword, default)
    if not isinstance(value, kind):
        raise ValueError(f"has {keyword!r}, which must be a {kind.__name__}")
    return value


def _split_plain(
    schema: JsonSchema, types: frozenset[str]
) -> tuple[list[JsonSchema], JsonSchema | None]:
    values = allowed_values([schema])
    rest = {key: value for key, value in schema.items() if key not in _TEXT_KEYWORDS | _LISTS}
    if values is None:
        others = sorted(types - STRING)
        return [schema], {**rest, "type": others} if others else None
    values = [value for value in values if is_of_type(value, schema)]
    text = {key: schema[key] for key in sorted(_TEXT_KEYWORDS & set(schema))}
    text["enum"] = [value for value in values if isinstance(value, str)]
    listed = [value for value in values if not isinstance(value, str)]
    return [text], {**rest, "enum": listed} if listed else None


def with_definitions(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    """Returns a part of `root`, with the definitions that it refers to. Raises ValueError for a
    reference to anything else."""
    refers, level = False, [schema]
    while level:
        node: Any = level.pop()
        level += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        reference = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(reference, str):
            refers = True
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                raise ValueError(f"refers to {reference!r}; only '#/$defs/...' is supported")
    shared = {key: root[key] for key in sorted(DEFINITIONS) if key in root}
    return {**shared, **schema} if refers else schema


class TextGrammar:
    """Creates rules of strings and their end. `end` follows each string, and no string contains one
    of `forbidden`."""

    def __init__(self, end: str, forbidden: Sequence[str], special: Mapping[str, int]) -> None:
        self._end = end
        self._lead, self._rest = grammar.split_marker(end, special)
        self._forbidden = forbidden
        self._bare = f"~/(?s:.*){grammar.any_of(forbidden)}(?s:.*)/"

    def rules(self, name: str, schema: JsonSchema, others: frozenset[str]) -> list[str]:
        """Returns the rules of a string and its end. `others` are the other types that the parser
        reads from text. Raises ValueError for a schema that no rule can enforce."""
        if "enum" in schema:
            return self._choice(name, _fitting(schema), others)
        bodies, nullable = _bodies(schema)
        if others:
            similar = "|".join(_LOOKALIKES[kind] for kind in sorted(others))
            bodies.append(f"~/[ \\t\\r\\n]*({similar})[ \\t\\r\\n]*/")
        text = " & ".join([*bodies, self._bare])
        terminal = name.upper()
        if not self._rest:
            return [f"{terminal}: {text}", f"{name}[lazy]: {terminal} {grammar.literal(self._end)}"]
        if self._lead:
            # The added token in `end` ends the text, which the other characters of `end` follow
            # directly.
            lead = grammar.literal(self._lead)
            return [
                f"{terminal}: {text}",
                f"{terminal}_END: {terminal} {lead}",
                f"{name}: {terminal}_END {self._rest}",
            ]
        maybe = "?" if nullable else ""
        return [f"{terminal}: /(?s:.+)/ & {text}", f"{name}: {terminal}{maybe} {self._rest}"]

    def _choice(self, name: str, values: list[str], others: frozenset[str]) -> list[str]:
        for value in values:
            checker = JsonChecker(others)
            checker.read(value)
            if checker.whole or any(one in value + self._end[:1] for one in self._forbidden):
                raise ValueError(
                    f"allows the text {value!r}, which would be parsed as another value"
                )
        if not values:
            raise ValueError("allows no value")
        texts = " | ".join(grammar.literal(value) for value in dict.fromkeys(values) if value)
        choice = f"({texts}){'?' if '' in values else ''}" if texts else ""
        return [
            f"{name}: {choice} {grammar.literal(self._lead) if self._lead else ''} {self._rest}"
        ]


def _fitting(schema: JsonSchema) -> list[str]:
    """Returns the listed texts that match the other keywords."""
    values: list[str] = schema["enum"]
    if not _TEXT_KEYWORDS & set(schema):
        return values
    bodies, nullable = _bodies(schema)
    fitting = " & ".join(bodies)
    return [
        value
        for value in values
        if (nullable if not value else not is_empty_terminal(f"{literal(value)} & {fitting}"))
    ]


def _bodies(schema: JsonSchema) -> tuple[list[str], bool]:
    """Returns expressions that the text must match, all of them, and whether the text may be
    empty."""
    known = {"type", "enum"} | _TEXT_KEYWORDS | _OTHER_KEYWORDS | ANNOTATIONS
    for keyword in sorted(set(schema) - known):
        raise ValueError(f"has {keyword!r}")
    least = field(schema, "minLength", int, 0)
    most = field(schema, "maxLength", int, MAX_LENGTH + 1)
    bodies, nullable = [], least == 0
    if least or most <= MAX_LENGTH:
        bodies.append(f"/(?s:.{{{least},{most if most <= MAX_LENGTH else ''}}})/")
    if "pattern" in schema:
        pattern = field(schema, "pattern", str)
        bodies.append(f"/{search_expression(pattern)}/")
        nullable = nullable and _finds_nothing(pattern)
    if known_format := _FORMATS.get(str(schema.get("format"))):
        bodies.append(f"/{known_format}/")
        nullable = False
    return bodies or ["/(?s:.*)/"], nullable


def _finds_nothing(pattern: str) -> bool:
    """Returns whether a pattern matches the empty text; False if Python does not support the
    pattern."""
    try:
        return re.search(pattern, "") is not None
    except re.error:
        return False
