"""Converts structured output to a grammar that workers follow (docs/guide/structured-output.md).

Every kind of `structured_outputs` becomes a text in Lark's notation. It is compiled once here, so
that the sender of a refused request gets the reason, and so that a worker can certainly compile it.
A check may take long: call it from a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.exact_numbers import decode_json, encode_json
from swell.cluster.text.grammar.lark_compiler import (
    MAX_BYTES,
    check_bytes,
    compile_lark,
    is_empty_rule,
    is_empty_terminal,
)
from swell.cluster.text.grammar.user_grammar import lark_of
from swell.cluster.text.json_grammar.json_lark import json_grammar, outermost
from swell.cluster.text.json_grammar.object_merging import literal
from swell.cluster.text.json_grammar.schema_keywords import SchemaKeywords
from swell.cluster.text.json_grammar.schema_nodes import (
    DEFINITIONS,
    SchemaError,
    at,
    children,
)
from swell.cluster.text.json_grammar.string_patterns import (
    ecma_expression,
    lark_expression,
    split_lookahead,
)
from swell.cluster.text.json_grammar.string_terminals import LIBRARY_SCHEMA
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.configs.error_text import shown
from swell.worker.sampler_wire import Grammar

MAX_SCHEMA_DEPTH = 100
"""Limit on levels of arrays and objects in a schema's text; the compiler's own parser stops at
128."""
MAX_CHOICES = 10_000
MAX_CHECKED_PATTERNS = 64
"""Limit on the patterns of a refused schema that are checked one by one, to name the invalid
one."""
MAX_SEARCH_S = 5.0
"""Limit on the time of the search for the invalid part of a form that is refused in any case."""
_NO_CHARACTER = "is empty; an answer has at least one character"

_KINDS = StructuredOutputs.__struct_fields__
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are not schemas."""


class GrammarFragment(msgspec.Struct, frozen=True):
    """The form of an answer, or of some text in one: exactly one of these, in Lark's notation."""

    rule: str = ""
    """A rule's expression, for use in other rules."""
    terminal: str = ""
    """A terminal's expression, which can be combined with others by `&`, `|` and `~`."""
    grammar: str | None = None
    """A whole grammar with its own names."""

    def to_grammar(self) -> str:
        """Returns the grammar of an answer with this form."""
        if self.terminal:
            return f"start: FORM\nFORM: {self.terminal}"
        return outermost(self.rule) if self.grammar is None else self.grammar


class SchemaTooLong(ValueError):
    """A schema that exceeds the size limit of grammars."""


def compile_grammar(
    structured_outputs: StructuredOutputs,
    param: str | None = None,
    keywords: SchemaKeywords | None = None,
) -> Grammar:
    """Returns the grammar of a request's structured output. Raises `BadRequest` for one that no
    grammar can enforce.

    `param` is the path of its field, if that is not `structured_outputs.<kind>`. `keywords`
    converts its schema; None refuses every keyword that no grammar can enforce.
    """
    kind, value = _given(structured_outputs, param)
    fragment = grammar_fragment(structured_outputs, param, keywords)
    param = param or f"structured_outputs.{kind}"
    try:
        return compile_lark(fragment.to_grammar(), param)
    except BadRequest:
        if kind == "json":
            _check_patterns(_parsed(value, param) if isinstance(value, str) else value, param)
        raise


def compile_schema(schema: JsonSchema, subject: str, param: str) -> Grammar:
    """Returns the grammar of a schema. Errors name `subject` and `param`. Raises `BadRequest`."""
    try:
        lark = f"start: {inline_json(schema)}"
    except ValueError as error:
        raise BadRequest(f"{subject} {error}", param, "invalid_grammar") from None
    try:
        return compile_lark(lark, param)
    except BadRequest as error:
        _check_patterns(schema, subject, param)
        raise BadRequest(f"{subject}: {error.message}", param, "invalid_grammar") from None


def _check_patterns(schema: Any, subject: str, param: str | None = None) -> None:
    """Raises BadRequest for the first pattern that is not a valid regular expression."""
    level, checked = [("", schema)], 0
    end_s = time.monotonic() + MAX_SEARCH_S
    while level and checked < MAX_CHECKED_PATTERNS and time.monotonic() < end_s:
        path, node = level.pop()
        if not isinstance(node, dict):
            continue
        for key in DEFINITIONS:
            level += [(at(at(path, key), name), one) for name, one in node.get(key, {}).items()]
        level += children(node, path)
        pattern = node.get("pattern")
        split = split_lookahead(pattern) if isinstance(pattern, str) else None
        if split is not None:
            checked += 1
            try:
                is_empty_terminal(f"/{ecma_expression(split.rest)}/")
            except ValueError as error:
                raise BadRequest(
                    f"{subject} has {at(path, 'pattern')}={shown(pattern)}, which is refused: "
                    f"{error}",
                    param or subject,
                    "invalid_grammar",
                ) from None


def grammar_fragment(
    structured_outputs: StructuredOutputs,
    param: str | None = None,
    keywords: SchemaKeywords | None = None,
) -> GrammarFragment:
    """Returns the form as a part of a grammar, not compiled yet; otherwise like
    `compile_grammar`."""
    kind, value = _given(structured_outputs, param)
    param = param or f"structured_outputs.{kind}"
    if isinstance(value, str):
        check_bytes(value, param)
    return _FRAGMENTS[kind](value, param, keywords or SchemaKeywords())


def _given(structured_outputs: StructuredOutputs, param: str | None) -> tuple[str, Any]:
    """Returns the only kind that is set, and its value."""
    values = msgspec.structs.asdict(structured_outputs)
    given = {kind: value for kind, value in values.items() if value is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise BadRequest(
            f"structured_outputs must set exactly one of {', '.join(_KINDS)}; it sets "
            f"{' and '.join(given) or 'none'}",
            param or "structured_outputs",
        )
    return given.popitem()


def inline_json(schema: JsonSchema) -> str:
    """Returns `%lark {...}`, a schema as a part of a rule, with bounded whitespace and numbers.
    Raises ValueError for one that no grammar can enforce, or that is too long, which a fast encoder
    measures."""
    try:
        size = len(encode_json(schema))
    except RecursionError:
        raise SchemaError("is nested too deeply") from None
    if size > MAX_BYTES:
        raise SchemaTooLong(f"has {size} bytes; at most {MAX_BYTES} are allowed")
    try:
        return json_grammar(SchemaKeywords().clean(schema), _is_empty)
    except RecursionError:
        raise SchemaError("is nested too deeply") from None


def _is_empty(expression: str) -> bool:
    if expression.startswith(LIBRARY_SCHEMA):
        return is_empty_rule(expression)
    try:
        return is_empty_terminal(expression)
    except ValueError as error:
        raise SchemaError(f"has a pattern that is refused: {error}") from None


def _json(value: JsonSchema | bool | str, param: str, keywords: SchemaKeywords) -> GrammarFragment:
    schema = _parsed(value, param) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise bad_value(param, schema, "is not a JSON schema; send an object or true")
    if schema is False:
        raise BadRequest(f"{param}=false is a schema that no answer can match", param)
    schema = {} if schema is True else schema
    own = schema.get("$id")
    for reference in _references(schema, param):
        if not reference.startswith("#") and not (
            isinstance(own, str) and own and reference.startswith(own)
        ):
            raise BadRequest(
                f"{param} refers to {shown(reference)}, but the server fetches no schemas; put "
                "the schema under $defs and refer to '#/$defs/<name>'",
                param,
            )
    try:
        return GrammarFragment(rule=inline_json(keywords.clean(schema, param)))
    except SchemaTooLong as error:
        raise BadRequest(f"{param} {error}", param) from None
    except SchemaError as error:
        raise BadRequest(f"{param} {error}", param, "invalid_grammar") from None
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"{param} contains a value that JSON cannot represent: {error}", param
        ) from None


def _parsed(text: str, param: str) -> Any:
    """Parses a schema that was sent as text; NaN and infinity are not accepted."""
    try:
        return decode_json(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not JSON: {error}", param) from None


def _references(schema: JsonSchema, param: str) -> Iterator[str]:
    """Yields every `$ref` of a schema. Raises `BadRequest` if it is nested too deeply."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, list):
                below += node
                continue
            below += [part for key, part in node.items() if key not in _DATA]
            yield from (
                target
                for key in ("$ref", "$dynamicRef", "$recursiveRef")
                if isinstance(target := node.get(key), str)
            )
        level = [node for node in below if isinstance(node, dict | list)]
        if not level:
            return
    raise BadRequest(
        f"{param} has more than {MAX_SCHEMA_DEPTH} levels of objects and arrays; move inner "
        "schemas to $defs",
        param,
    )


def _json_object(_value: bool, _param: str, _keywords: SchemaKeywords) -> GrammarFragment:
    return GrammarFragment(rule=inline_json({"type": "object"}))


def _regex(value: str, param: str, _keywords: SchemaKeywords) -> GrammarFragment:
    if not value:
        raise bad_value(param, value, _NO_CHARACTER)
    return GrammarFragment(terminal=f"/{lark_expression(value)}/")


def _choice(value: list[str], param: str, _keywords: SchemaKeywords) -> GrammarFragment:
    if not value:
        raise bad_value(param, value, "must have at least one text")
    if len(value) > MAX_CHOICES:
        raise BadRequest(
            f"{param} holds {len(value)} texts; at most {MAX_CHOICES} are allowed", param
        )
    for index, text in enumerate(value):
        if not text:
            raise bad_value(f"{param}[{index}]", text, _NO_CHARACTER)
    check_bytes("".join(value), param)
    # One terminal: a lexer's automaton can hold thousands of texts, a parser's rule cannot.
    return GrammarFragment(terminal=" | ".join(map(literal, dict.fromkeys(value))))


_FRAGMENTS: dict[str, Callable[[Any, str, SchemaKeywords], GrammarFragment]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": lambda value, param, _: GrammarFragment(grammar=lark_of(value, param)),
}
