"""A tool's schema determines the types of values that are written as text, in answers and in
grammars."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from swell.cluster.text.parsers import make_parser, tool_format
from swell.cluster.text.parsers.deltas import Tool, collect
from swell.cluster.text.parsers.grammar import GrammarBuilder
from swell.cluster.text.parsers.notations.text_grammar import (
    TextGrammar,
    search_expression,
    split_schema,
)
from swell.cluster.text.parsers.notations.typed_text import parameter_types
from tests.cluster.text.parsers.sample_outputs import read
from tests.cluster.text.parsers.test_sections import TOOLS, qwen


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("count", "42", 42),
        ("count", " 42\n", 42),
        ("count", "many", "many"),
        ("ratio", "3.14", 3.14),
        ("sloppy", "3.14", 3.14),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "trueish", "trueish"),
        ("dimensions", '{"a": "</parameter>"}', {"a": "</parameter>"}),
        ("dimensions", "{'a': 1}", "{'a': 1}"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("or_null", "None", None),
        ("or_null", "nullable", "nullable"),
        ("or_null", "12", "12"),
        ("int_or_null", "12", 12),
        ("int_or_null", "null", None),
        ("object_or_null", '{"key": {}}', {"key": {}}),
        ("choice", "1", "1"),
        ("const", "3", 3),
        ("unknown", "12", 12),
        ("unknown", "twelve", "twelve"),
        ("unknown", '"quoted"', "quoted"),
        ("unknown", '{"a": 1', '{"a": 1'),
        ("unknown", "", ""),
    ],
)
def test_the_schema_types_a_text(key: str, text: str, value: object) -> None:
    for line in (qwen({key: text}), f"{qwen({key: text})}\n{qwen({}, 'g')}"):
        call = collect(read(("qwen3_coder", None), [*line], TOOLS)).tool_calls[0]
        assert json.loads(call.arguments) == {key: value}


def test_strings_are_streamed_and_numbers_are_released_complete() -> None:
    text = qwen({"city": 'New "York', "count": "42"})
    shown = []
    parser = make_parser("qwen3_coder", None, lambda: "id", TOOLS)
    for char in text:
        parts = parser.push(char)
        shown.append("".join(getattr(part, "text", "") for part in parts))
    assert [one for one in shown if one] == [
        "{", '"city": "', *"New ", '\\"', *"York", '"', ', "count": ', "42", "}"
    ]  # fmt: skip


@pytest.mark.parametrize("escape", ["\\", "\\u00", "\\q"])
def test_a_value_ends_within_an_escape_that_json_does_not_have(escape: str) -> None:
    """No continuation of such a value is JSON, so the next end marker ends it."""
    text = f'<tool_call>\n<function=f>\n<parameter=x>\n["a{escape}</parameter>\n</function>'
    calls = collect(make_parser("qwen3_coder", None, lambda: "id", TOOLS).push(text)).tool_calls
    assert json.loads(calls[0].arguments) == {"x": f'["a{escape}'}


def test_references_may_be_circular() -> None:
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}}
    loop["properties"] = {"x": {"$ref": "#/$defs/A"}}
    assert len(parameter_types(loop, "x")) == 6


DIAMONDS = {f"A{i}": {"anyOf": [{"$ref": f"#/$defs/A{i - 1}"}] * 2} for i in range(1, 10)}
DIAMONDS |= {"A0": {"type": "string"}}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"minProperties": 1}, "parameters of tool 'f' have 'minProperties', which cannot be"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        ({"patternProperties": {"a": {}}}, "'patternProperties'"),
        ({"properties": {"a>b": {}}, "required": ["a>b"]}, "argument 'a>b' of tool 'f' has a name"),
        ({"properties": {"a": {"enum": ["x</parameter>"]}}}, "allows the text 'x</parameter>'"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "allows the text '1'"),
        ({"properties": {"a": {"type": "string", "pattern": "a$b"}}}, "the pattern 'a$b': "),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "the pattern "),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "'a' of tool 'f' has 'not'"),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {}]}}},
            "combines anyOf, oneOf, allOf",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
            "self",
        ),
        (
            {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}}},
            "refers to '#/properties/b'",
        ),
    ],
)
def test_schemas_that_elements_cannot_enforce_are_refused_by_name(
    parameters: dict[str, Any], reason: str
) -> None:
    tool = Tool("f", parameters=parameters)
    with pytest.raises(ValueError, match=re.escape(reason)):
        tool_format("qwen3_coder").call_grammar(GrammarBuilder([tool], True, {}))


def allowed_texts(schema: Any, root: dict[str, Any]) -> tuple[list[str], Any]:
    """Returns the texts of an argument, and the schema of its other values."""
    texts, others = split_schema(schema, root)
    grammar = TextGrammar("</parameter>", ("</parameter>",), {})
    types = parameter_types({"properties": {"a": schema}, **root}, "a") - {"string"}
    (choice,) = [line for text in texts for line in grammar.rules("t", text, types)]
    return re.findall(r'"(.*?)"', choice)[:-1], others


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"enum": ["a", 1]}, ["a"], {"enum": [1]}),
        ({"type": "string", "enum": ["a", 1, None]}, ["a"], None),
        ({"type": ["string", "null"], "enum": ["a", 1, None]}, ["a"], {"enum": [None]}),
        ({"type": ["string", "integer"], "enum": ["a", 1.5, 2.0]}, ["a"], {"enum": [2.0]}),
        ({"type": "string", "enum": ["a", "bc", "de"], "minLength": 2}, ["bc", "de"], None),
        ({"enum": ["a", "bc", 7], "pattern": "^b"}, ["bc"], {"enum": [7]}),
        ({"enum": ["a", "b"], "const": "b"}, ["b"], None),
        ({"allOf": [{"$ref": "#/$defs/A"}], "default": "x", "description": "d"}, ["x", "y"], None),
    ],
)
def test_listed_values_fit_the_other_keywords(schema: Any, texts: list[str], others: Any) -> None:
    found, rest = allowed_texts(schema, {"$defs": {"A": {"enum": ["x", "y"]}}})
    assert found == texts
    assert (rest and {"enum": rest["enum"]}) == others


@pytest.mark.parametrize(
    ("pattern", "found", "missed"),
    [
        ("^[A-Z]{2}$", ["AB"], ["ABC", "xAB", "a"]),
        ("b+", ["abc", "b", "\nb\n"], ["", "ac"]),
        ("^a/b", ["a/b", "a/bc"], ["xa/b"]),
        ("(x|y)$", ["ax", "y"], ["xa"]),
        (r"\$$", ["1$"], ["1", "$1"]),
        ("[$|^]", ["a|", "^"], ["a"]),
        ("x|y", ["ax", "ya"], ["a"]),
    ],
)
def test_patterns_are_searched_in_the_text(
    pattern: str, found: list[str], missed: list[str]
) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    for text in found + missed:
        matcher = llguidance.LLMatcher(tokenizer, f"start: /{search_expression(pattern)}/")
        ids = list(text.encode())
        whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert whole == (text in found), (pattern, text)
