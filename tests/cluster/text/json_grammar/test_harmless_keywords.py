"""Keywords that constrain nothing at their place are ignored. A part that no value fits does not
affect the others."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs
from tests.cluster.text.schema.test_schema_walks import BYTES

Schema = dict[str, Any]
VALUES: list[Any] = [None, 1, 2.5, "", "a", "b", "ab", [], [1], ["a"], [1, 1], {}]
VALUES += [{"a": 1}, {"b": 1}, {"a": "a"}, {"ab": 1}, {"a": 1, "b": 1}]
NAMES: dict[str, Any] = {
    "examples": {"type": "string", "examples": ["a"]},
    "default": {"type": "string", "default": "a"},
    "deprecated": {"type": "string", "deprecated": True},
    "extension": {"type": "string", "x-foo": 1},
    "unknown format": {"type": "string", "format": "foo"},
    "reference": {"$ref": "#/$defs/s"},
    "reference with a pattern": {"$ref": "#/$defs/p", "maxLength": 1.0},
    "all of": {"allOf": [{"minLength": 1}, {"pattern": "b"}]},
    "other kinds": {"minimum": 3, "items": False, "properties": {"a": False}},
    "not false": {"not": False},
    "numbers of a list": {"type": "integer", "enum": ["a"]},
    "numbers": {"type": ["integer", "null"]},
    "list and length": {"enum": ["a", "ab"], "minLength": 2},
    "if alone": {"if": {"const": "a"}},
}
HARMLESS: dict[str, Schema] = {
    **{
        f"names: {name}": {"type": "object", "propertyNames": names}
        for name, names in NAMES.items()
    },
    "unique items of a string": {"type": "string", "uniqueItems": True},
    "items of null": {"type": ["null", "string"], "contains": {"type": "string"}},
    "dependent of a string": {"type": "string", "dependentRequired": {"a": ["b"]}},
    "names of a number": {"type": "integer", "propertyNames": {"format": "uuid"}},
    "pattern of a number": {"type": "integer", "pattern": "a(?=b)"},
    "not another kind": {"type": "string", "not": {"type": "integer"}},
    "not a kind, and list": {"type": ["string", "null"], "not": {"type": ["object", "array"]}},
    "unevaluated items": {"type": "string", "allOf": [{}], "unevaluatedItems": False},
    "if false": {"if": False, "then": {"type": "string"}, "type": ["null", "string"]},
    "if false, else": {"if": False, "else": {"type": "string"}},
    "if true": {"if": True, "then": {"type": "string"}, "else": False},
    "contains any": {"type": "array", "contains": True},
    "contains up to one": {"type": "array", "contains": {}, "minContains": 0, "maxContains": 1},
    "depends on itself": {"type": "object", "dependentRequired": {"a": ["a"]}},
    "impossible property": {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^a$", "maxLength": 0}},
    },
    "impossible constant": {
        "anyOf": [{"type": "integer"}, {"type": "string", "const": "", "pattern": "b$"}]
    },
    "impossible list": {
        "anyOf": [{"type": "null"}, {"type": "string", "enum": ["a"], "pattern": "^b$"}]
    },
    "impossible patterns": {
        "anyOf": [{"const": 1}, {"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}]
    },
}
DEFINITIONS = {"s": {"type": "string"}, "p": {"$ref": "#/$defs/s", "pattern": "^a"}}


def accepted(lark: str) -> list[Any]:
    matcher = LLMatcher(BYTES, lark, log_level=0)
    found = []
    for value in VALUES:
        state, tokens = matcher.deep_copy(), [*json.dumps(value).encode()]
        if state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting():
            found.append(value)
    return found


@pytest.mark.parametrize("name", HARMLESS)
def test_a_grammar_accepts_the_valid_values(name: str) -> None:
    schema = {**HARMLESS[name], "$defs": DEFINITIONS}
    validator = jsonschema.Draft202012Validator(schema)
    lark = compile_grammar(StructuredOutputs(json=schema)).lark
    assert accepted(lark) == [value for value in VALUES if validator.is_valid(value)]


STILL_REFUSED: dict[str, Schema] = {
    "not of the same kind": {"type": "number", "not": {"type": "integer"}},
    "names of a choice": {"propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]}},
    "names of a branch": {"propertyNames": {"if": False, "else": {"maxLength": 1}}},
    "names of a format": {"propertyNames": {"allOf": [{"format": "uuid"}]}},
    "unique items of some": {"type": ["string", "array"], "uniqueItems": True},
}


@pytest.mark.parametrize("name", STILL_REFUSED)
def test_keywords_that_constrain_a_value_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot be enforced"):
        compile_grammar(StructuredOutputs(json=STILL_REFUSED[name]))


def test_the_path_of_an_impossible_string_is_named() -> None:
    impossible = {"type": "string", "pattern": "^a$", "maxLength": 0}
    schema = {"type": "object", "properties": {"a": impossible}, "required": ["a"]}
    with pytest.raises(BadRequest, match=r"no string has this pattern.* at properties\.a"):
        compile_grammar(StructuredOutputs(json=schema))
