"""Patterns of names, `propertyNames` and `unevaluatedProperties`: the grammar accepts exactly the
objects that `jsonschema` accepts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.json_grammar import schema_merging
from swell.cluster.text.params.sampling_params import StructuredOutputs
from tests.cluster.text.schema.test_schema_walks import BYTES, fits

Schema = dict[str, Any]
NAMES = ("a", "ab", "b", "xb", "cd")
VALUES = (1, "s")
OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(3)
    for names in itertools.combinations(NAMES, count)
    for values in itertools.product(VALUES, repeat=count)
]
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
PARTS = st.sampled_from([True, INTEGER, TEXT, False])
PROPERTY_NAMES = st.sampled_from(
    [
        {"pattern": "^[ab]"},
        {"minLength": 2},
        {"maxLength": 1, "type": "string"},
        {"pattern": "b$", "maxLength": 2},
        {"enum": ["a", "xb"]},
        {"const": "ab"},
    ]
)


@st.composite
def objects(draw: st.DrawFn, depth: int, *, refers: bool = True) -> Schema:
    """Draws a schema of an object. With `refers` it may refer to the definition."""
    schema: Schema = {}

    def add(keyword: str, value: st.SearchStrategy[Any], one_of: int) -> None:
        if draw(st.integers(0, one_of - 1)) == 0:
            schema[keyword] = draw(value)

    add("properties", st.dictionaries(st.sampled_from(NAMES), PARTS, max_size=3), 2)
    patterns = st.sampled_from(["^a", "b$", "^x", "^[a-c]+$", "^(a|cd)$"])
    add("patternProperties", st.dictionaries(patterns, PARTS, max_size=3), 2)
    add("propertyNames", PROPERTY_NAMES, 3)
    add("additionalProperties", PARTS, 4)
    add("required", st.lists(st.sampled_from(NAMES), max_size=1), 3)
    if depth:
        add("allOf", st.lists(objects(depth - 1, refers=refers), max_size=2), 2)
        add("anyOf", st.lists(objects(depth - 1, refers=refers), min_size=1, max_size=2), 4)
        if refers:
            add("$ref", st.just("#/$defs/x"), 3)
    add("unevaluatedProperties", st.sampled_from([False, False, INTEGER, True]), 2)
    return schema


def taken(lark: str) -> list[Any]:
    """Returns the objects that the grammar accepts with their members in some order."""
    matcher = LLMatcher(BYTES, lark, log_level=0)
    return [value for value in OBJECTS if _takes(matcher, value)]


def _takes(matcher: LLMatcher, value: Any) -> bool:
    for members in itertools.permutations(value.items()):
        text = json.dumps(dict(members)).encode()
        state = matcher.deep_copy()
        if state.try_consume_tokens([*text]) == len(text) and state.is_accepting():
            return True
    return False


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(objects(2), objects(1, refers=False))
@example({"patternProperties": {"^a": INTEGER, "b$": TEXT}}, {})
@example({"patternProperties": {"^a": INTEGER, "b$": True}, "additionalProperties": False}, {})
@example({"allOf": [{"properties": {"a": TEXT}}], "unevaluatedProperties": False}, {})
@example({"$ref": "#/$defs/x", "unevaluatedProperties": False}, {"patternProperties": {"b$": TEXT}})
@example({"propertyNames": {"enum": ["a", "b"]}, "unevaluatedProperties": False}, {})
@example({"allOf": [{"propertyNames": {"pattern": "a"}}], "unevaluatedProperties": False}, {})
def test_a_grammar_accepts_the_valid_objects(schema: Schema, inner: Schema) -> None:
    schema = {"type": "object", **schema, "$defs": {"x": inner}}
    fitting = [value for value in OBJECTS if fits(schema, value)]
    try:
        lark = compile_grammar(StructuredOutputs(json=schema)).lark
    except BadRequest as refusal:
        lark, reason = "", refusal.message
    if lark:
        assert taken(lark) == fitting, schema
    else:
        is_none = "no answer can match" in reason and not fitting
        assert is_none or ("anyOf" in repr(schema) and "unevaluatedProperties=" in reason), schema


DYNAMIC = {"properties": {"b": INTEGER}}
UNHELD: dict[str, Schema] = {
    "a choice": {"anyOf": [DYNAMIC, True], "unevaluatedProperties": False},
    "a choice in another schema": {"allOf": [{"oneOf": [DYNAMIC]}], "unevaluatedProperties": False},
    "if": {"if": DYNAMIC, "unevaluatedProperties": False},
    "names by a format": {"propertyNames": {"format": "uuid"}},
    "names by a part of a pattern": {"propertyNames": {"pattern": "a(?=b)"}},
    "names by a choice": {"propertyNames": {"anyOf": [{"minLength": 2}, {"const": "a"}]}},
}


@pytest.mark.parametrize("name", UNHELD)
def test_keywords_that_depend_on_the_object_are_refused_by_name(name: str) -> None:
    schema = {"type": "object", **UNHELD[name]}
    with pytest.raises(BadRequest, match=r"unevaluatedProperties=|propertyNames="):
        compile_grammar(StructuredOutputs(json=schema))


def test_a_choice_without_new_properties_is_enforced() -> None:
    known = {"properties": {"a": INTEGER, "b": {}}, "unevaluatedProperties": False}
    for choice in ({"anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}}]}, {"if": DYNAMIC}):
        schema = {"type": "object", **known, **choice}
        lark = compile_grammar(StructuredOutputs(json=schema)).lark
        fitting = [value for value in OBJECTS if fits(schema, value)]
        assert taken(lark) == fitting


def test_many_patterns_that_overlap_are_refused_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema_merging, "MAX_PROBES_S", 600.0)  # a busy machine compares slowly
    patterns = {letter: {"maximum": number} for number, letter in enumerate("abcdefgh")}
    schema = {"type": "object", "patternProperties": patterns}
    with pytest.raises(BadRequest, match=r"8 patterns .* more than 32 ways"):
        compile_grammar(StructuredOutputs(json=schema))
