r"""Grammars of arguments that are not written as one JSON object.

In Python's notation each argument is a name and a JSON value, which the Python reader accepts too.
In Gemma's notation the strings and keys inside values differ from JSON as well, so the grammar
follows the schema down; keywords that it cannot enforce there are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from swell.cluster.text.exact_numbers import encode_json
from swell.cluster.text.grammar.structured_output import inline_json
from swell.cluster.text.json_grammar.schema_values import allowed_values, is_of_type
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import any_call, literal, marker_expression, parameters_of
from swell.cluster.text.parsers.notations.notation import PYTHON, Notation
from swell.cluster.text.parsers.notations.text_grammar import (
    ANNOTATIONS,
    DEFINITIONS,
    OBJECT_KEYWORDS,
    with_definitions,
)
from swell.cluster.text.parsers.notations.typed_text import resolve

MAX_DEPTH = 32
"""Limit on the nesting of values in a schema."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_KNOWN_KEYS = {
    "object": OBJECT_KEYWORDS,
    "array": frozenset(("type", "items")),
    "string": frozenset(("type",)),
}
_SCALARS = ("number", "integer", "boolean", "null")


def python_calls(tools: Sequence[Tool]) -> list[str]:
    """Returns rules of `call`: `f(a=1, b="x")`."""
    return _rules(_PythonArguments, tools, PYTHON, ", ")


def gemma_calls(tools: Sequence[Tool], notation: Notation, special: Mapping[str, int]) -> list[str]:
    """Returns rules of `call`: `call:f{a:1,b:QUOTExQUOTE}`."""
    rules = _rules(_GemmaArguments, tools, notation, ",")
    return rules + _gemma_values(notation.mark, special)


class _Arguments:
    """Creates the rules for the arguments of one tool."""

    def __init__(self, tool: Tool, index: int, notation: Notation, separator: str) -> None:
        self._assign, self._separator = notation.assign, separator
        self.rules: list[str] = []
        self._prefix = f"args_{index}"
        self._references: dict[str, str] = {}
        """Maps a reference to the rule of its target, which may refer to itself."""
        self._root = parameters_of(tool)
        self.all = self.members(self._root, f"parameters of tool {tool.name!r}", 0)

    def value(self, schema: JsonSchema, where: str, depth: int) -> str:
        """Returns the name of a rule, or an expression in brackets."""
        raise NotImplementedError

    def members(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """Returns the expression of the properties in their order: the required ones, and any of
        the others. After a member, a rule continues with the members after it."""
        self._check(schema, OBJECT_KEYWORDS, where)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        properties = {**properties, **{name: {} for name in required if name not in properties}}
        made = []
        for name, one in properties.items():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{where} have the property {name!r}, but this format writes names without "
                    "quotes; use only letters, digits and _"
                )
            value = self._value(one, f"{name!r} in the {where}", depth + 1)
            made.append(f"{literal(name + self._assign)} {value}")
        after, alternatives = "", [""]
        for name, member in reversed([*zip(properties, made, strict=True)]):
            first, rest = f"{member} {after}", f"{literal(self._separator)} {member}"
            if name in required:
                alternatives = [first]
            else:
                alternatives.append(first)
                rest = f"({rest})?"
            after = self._rule(f"{rest} {after}")
        optional = "?" if alternatives[0] == "" else ""
        choices = " | ".join(one for one in reversed(alternatives) if one)
        return f"({choices}){optional}" if choices else ""

    def _value(self, schema: Any, where: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"{where} are nested more than {MAX_DEPTH} levels deep")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError(
                f"{where} have the schema {schema!r}, which is not a schema of an argument"
            )
        return self.value(schema, where, depth)

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression.rstrip()}")
        return name

    def _check(self, schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        for key in sorted(set(schema) - known - ANNOTATIONS - DEFINITIONS):
            raise ValueError(
                f"{where} have {key!r} in their schema, which cannot be enforced in this model's "
                "format of calls; leave it out, or send tool_choice='auto' without 'strict'"
            )


class _PythonArguments(_Arguments):
    def value(self, schema: JsonSchema, where: str, depth: int) -> str:
        """Returns a rule for a JSON value, with the definitions that it refers to."""
        try:
            return self._rule(inline_json(with_definitions(schema, self._root)))
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None


class _GemmaArguments(_Arguments):
    def value(self, schema: JsonSchema, where: str, depth: int) -> str:
        if not schema:
            return "any_value"
        if "$ref" in schema:
            self._check(schema, frozenset(("$ref",)), where)
            return self._referred(schema["$ref"], where, depth)
        values = allowed_values([schema])
        if values is not None:
            self._check(schema, frozenset(("type", "const", "enum")), where)
            written = [_written(one, where) for one in values if is_of_type(one, schema)]
            if not written:
                raise ValueError(f"{where} allow no value")
            return f"({' | '.join(written)})"
        if len(schema.get("allOf", ())) == 1:
            self._check(schema, frozenset(("allOf",)), where)
            return self._value(schema["allOf"][0], where, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._check(schema, frozenset((key,)), where)
                return self._one_of(schema[key], where, depth)
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            return self._one_of([{**schema, "type": one} for one in kind], where, depth)
        return self._of_kind(kind, schema, where, depth)

    def _of_kind(self, kind: Any, schema: JsonSchema, where: str, depth: int) -> str:
        if kind in _SCALARS:
            return self._rule(inline_json(schema))
        self._check(schema, _KNOWN_KEYS.get(kind, frozenset()), where)
        if kind == "string":
            return "string"
        if kind == "array":
            item = self._value(schema.get("items", True), f"items of {where}", depth + 1)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if schema.get("properties") or schema.get("additionalProperties") is False:
            return self._rule(f'"{{" {self.members(schema, where, depth)} "}}"')
        others = schema.get("additionalProperties", True)
        item = f'NAME ":" {self._value(others, f"properties of {where}", depth + 1)}'
        return self._rule(f'"{{" ({item} ("," {item})*)? "}}"')

    def _one_of(self, schemas: list[Any], where: str, depth: int) -> str:
        return f"({' | '.join(self._value(one, where, depth + 1) for one in schemas)})"

    def _referred(self, reference: str, where: str, depth: int) -> str:
        defined = reference.startswith(("#/$defs/", "#/definitions/"))
        found = resolve(reference, self._root) if defined else None
        if found is None:
            raise ValueError(f"{where} refer to {reference!r}, which is not in '#/$defs'")
        if reference not in self._references:
            rule = self._references[reference] = f"{self._prefix}_ref_{len(self._references)}"
            self.rules.append(
                f"{rule}: {self._value(found, f'{reference!r} of {where}', depth + 1)}"
            )
        return self._references[reference]


def _written(value: Any, where: str) -> str:
    match value:
        case str():
            return f"quote {literal(value)} quote" if value else "quote quote"
        case list():
            items = ' "," '.join(_written(one, where) for one in value)
            return f'"[" {items} "]"'
        case dict():
            raise ValueError(f"{where} are objects in an enum, which this format cannot enforce")
    return literal(encode_json(value).decode())


def _gemma_values(quote: str, special: Mapping[str, int]) -> list[str]:
    """Returns the rules of strings and of values without a schema."""
    text = "quote TEXT_INSIDE? quote" if quote in special else f"{literal(quote)} text_inside"
    return [
        f"quote: {marker_expression(quote, special)}",
        f"string: {text}",
        f"TEXT_INSIDE: /(?s:.+)/ & ~/(?s:.*){re.escape(quote)}(?s:.*)/"
        if quote in special
        else f"text_inside[lazy]: /(?s:.*)/ {literal(quote)}",
        r"NAME: /[A-Za-z_][A-Za-z0-9_]*/",
        "any_value: string | any_scalar | any_array | any_object",
        f"any_scalar: {inline_json({'type': list(_SCALARS)})}",
        'any_array: "[" (any_value ("," any_value)*)? "]"',
        'any_object: "{" (any_member ("," any_member)*)? "}"',
        'any_member: NAME ":" any_value',
    ]


def _rules(
    kind: type[_Arguments], tools: Sequence[Tool], notation: Notation, separator: str
) -> list[str]:
    calls, rules = [], []
    for index, tool in enumerate(tools):
        arguments = kind(tool, index, notation, separator)
        head = literal(notation.prefix + tool.name + notation.open)
        calls.append(f"call_{index}: {head} {arguments.all} {literal(notation.close)}")
        rules += arguments.rules
    return [f"call: {any_call(tools)}", *calls, *rules]
