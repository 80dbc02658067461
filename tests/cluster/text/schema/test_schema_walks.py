"""Every accepted schema can be followed to an end, and the resulting text fits the schema.

Schemas are drawn at random. A text is drawn byte by byte among those that the grammar allows, and
validated with `jsonschema`. A state without any allowed byte fails the draw itself.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs

BYTES = LLTokenizer("byte")
END = BYTES.eos_token
CLOSERS = b'"}]'
OPENERS = b"[{,"
LONG_BYTES, MAX_BYTES = 150, 1000
Schema = dict[str, Any]

_NAMES = ("a", "b", "ab", "é", 'q"')
_VALUES = st.sampled_from([None, True, 0, 1, 2.5, "a", "", "ab", [1], {"a": 1}, [], {}])
_LEAVES = st.one_of(
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(
        lambda name: {"type": name}
    ),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
    st.builds(
        lambda low, high: {"type": "integer", "minimum": low, "maximum": low + high},
        st.integers(-30, 30),
        st.integers(-1, 20),
    ),
    st.builds(
        lambda low, high: {"type": "string", "minLength": low, "maxLength": high},
        st.integers(0, 2),
        st.integers(0, 4),
    ),
    st.sampled_from(["^a", "b$", "^a?b*$", "^(?!a)[ab]+$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from([{}, True, False, {"$ref": "#/$defs/x"}, {"$ref": "#"}]),
)


@st.composite
def objects(draw: st.DrawFn, parts: st.SearchStrategy[Any]) -> Schema:
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=3))
    schema: Schema = {"type": "object", "properties": {name: draw(parts) for name in names}}
    schema["required"] = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=2))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | parts)
    if draw(st.integers(0, 3)) == 0:
        patterns = draw(st.lists(st.sampled_from(["^a", "^a$", "b$", "^(x|b)$"]), max_size=2))
        schema["patternProperties"] = {pattern: draw(parts) for pattern in patterns}
    if draw(st.integers(0, 4)) == 0:
        schema["propertyNames"] = draw(st.sampled_from([{"pattern": "b"}, {"maxLength": 2}]))
    if draw(st.integers(0, 4)) == 0:
        schema["unevaluatedProperties"] = draw(st.just(False) | parts)
    for keyword in ("minProperties", "maxProperties"):
        if draw(st.integers(0, 4)) == 0:
            schema[keyword] = draw(st.integers(0, 3))
    return schema


@st.composite
def arrays(draw: st.DrawFn, parts: st.SearchStrategy[Any]) -> Schema:
    schema: Schema = {"type": "array"}
    if draw(st.booleans()):
        schema["items"] = draw(parts)
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(parts, max_size=2))
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["maxItems"] = draw(st.integers(0, 3))
    return schema


def _combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(parts, min_size=1, max_size=3)
    return st.one_of(
        objects(parts),
        arrays(parts),
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"allOf": schemas}),
        st.builds(lambda one, two: {**one, "anyOf": two}, objects(parts), several),
    )


_SCHEMAS = st.recursive(_LEAVES, _combined, max_leaves=5)


def walk(lark: str, seed: int) -> str:
    """Draws a text of the grammar. Closes brackets and quotes early, and ends a long text as soon
    as possible."""
    matcher = LLMatcher(BYTES, lark, log_level=0)
    rng, text = random.Random(seed), bytearray()
    while True:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, (bytes(text), matcher.get_error()[:200])
        is_long = len(text) > LONG_BYTES
        if END in allowed and (is_long or len(allowed) == 1 or rng.random() < 0.4):
            return text.decode()
        tokens = [token for token in allowed if token != END]
        closers = [token for token in tokens if token in CLOSERS]
        if is_long:
            tokens = [token for token in tokens if token not in OPENERS] or tokens
            # Some patterns end with b. Inside a string, a bracket closes nothing.
            ends = [token for token in b'"b' if token in tokens]
            tokens, closers = (ends[:1], []) if ends else (tokens, closers)
        token = rng.choice(closers if closers and (is_long or rng.random() < 0.5) else tokens)
        assert matcher.consume_token(token), matcher.get_error()[:200]
        text.append(token)
        assert len(text) < MAX_BYTES, f"a text that has no end: {bytes(text[:80])!r}"


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(_SCHEMAS, _SCHEMAS, st.integers(0, 2**32))
@example({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True, 0)
@example(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "patternProperties": {"^a$": {"type": "integer"}},
        "additionalProperties": False,
    },
    True,
    0,
)
@example({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, {"$ref": "#/$defs/x"}, 0)
@example({"type": "string", "pattern": "b$"}, {}, 0)
@example({"anyOf": [{"type": "array", "items": False, "minItems": 1}, {"type": "null"}]}, {}, 0)
def test_every_accepted_walk_ends_in_a_valid_value(schema: Any, inner: Any, seed: int) -> None:
    schema = {**schema, "$defs": {"x": inner}} if isinstance(schema, dict) else schema
    lark = compiled(schema)
    for number in range(3) if lark else ():
        text = walk(lark, seed + number)
        assert fits(schema, json.loads(text)), (schema, text)


_KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "$id", "not", "if"),
        *("then", "minimum", "exclusiveMaximum", "multipleOf", "minLength", "pattern", "format"),
        *("items", "prefixItems", "minItems", "uniqueItems", "contains", "properties", "required"),
        *("patternProperties", "additionalProperties", "propertyNames", "minProperties"),
        *("dependentRequired", "unevaluatedProperties", "unevaluatedItems", "$anchor"),
    ]
)
_JUNK = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 1.5, 1e308, 10**40, "", "a", "string", "#", "#/$defs/a", "(["]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_KEYWORDS | st.sampled_from(["a", "^a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(_KEYWORDS, _JUNK, min_size=1, max_size=4))
@example({"not": {"not": {}}})
@example({"propertyNames": {"enum": [1, "a"]}, "properties": {"b": {}}})
@example({"$ref": "#"})
@example({"$defs": {"a": {"$anchor": "x", "type": "null"}}, "$ref": "#x"})
@example({"type": ["string", ["null"]]})
def test_any_object_is_a_schema_or_refused(schema: Schema) -> None:
    compiled(schema)


@pytest.mark.parametrize("keyword", ["minimum", "const", "multipleOf"])
def test_numbers_that_json_does_not_have_are_refused(keyword: str) -> None:
    for number in (float("nan"), float("inf")):
        assert compiled({keyword: number}) == ""


def wide(keyword: str, count: int) -> Schema:
    return {keyword: [{"anyOf": [{"minimum": n + m} for m in range(4)]} for n in range(count)]}


@pytest.mark.parametrize(
    "schema",
    [
        wide("allOf", 30),
        {"oneOf": [{"type": "object", "required": [f"a{n}"]} for n in range(300)]},
        {
            "properties": {f"a{n}": {} for n in range(200)},
            "patternProperties": {f"^b{n}": {} for n in range(5)},
        },
        {"type": "object", "properties": {f"a{n}": {} for n in range(900)}, "minProperties": 99},
        {"allOf": [{"minLength": n} for n in range(600)]},
        {
            "type": "object",
            "properties": {f"field {n}": {"type": "string"} for n in range(900)},
            "additionalProperties": False,
        },
    ],
    ids=["combinations", "one of", "patterns", "counts", "all of", "optional"],
)
def test_an_expensive_schema_is_refused(schema: Schema) -> None:
    assert compiled(schema) == ""


def test_long_but_cheap_lists_are_enforced() -> None:
    assert compiled({"oneOf": [{"const": f"text {n}", "title": "x"} for n in range(1000)]})
    names = {f"field {n}": {"type": "string"} for n in range(600)}
    assert compiled({"type": "object", "properties": names, "additionalProperties": False})
    assert compiled({"type": "object", "properties": names, "required": [*names]})
    assert compiled({"enum": [*range(2000)]})


def compiled(schema: Any) -> str:
    """Returns the grammar of a schema, or an empty text if the schema is refused."""
    try:
        return compile_grammar(StructuredOutputs(json=schema)).lark
    except BadRequest:
        return ""


def fits(schema: Any, value: Any) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(value)
    except jsonschema.ValidationError:
        return False
    except RecursionError:  # a schema that refers directly to itself decides nothing
        return True
    return True
