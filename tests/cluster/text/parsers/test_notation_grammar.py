"""Grammars of Python's and of Gemma's notation: the texts that they allow and the schemas that they
refuse."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster.text.parsers import tool_format
from swell.cluster.text.parsers.answer_grammar import answer
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import GrammarBuilder
from tests.cluster.text.parsers.test_grammar import SPECIAL, ByteTokenizer

RICH: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["name"],
        }
    },
    "properties": {
        "unit": {"enum": ["C", "F", 3, None, ["x"]]},
        "n": {"type": "integer", "minimum": 2},
        "node": {"$ref": "#/$defs/Node"},
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]},
        "kinds": {"type": ["boolean", "string"]},
        "any": {},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
        "word": {"type": "string", "enum": ["a", 1]},
        "old": {"allOf": [{"$ref": "#/$defs/Node"}], "description": "as pydantic writes it"},
    },
    "required": ["n"],
}

PYTHON = [
    ("[f(n=2)]", True),
    ('[f(unit="C", n=12, node={"name": "a"}, any=[1, {"b": null}])]', True),
    ('[f(n=2, map={"x": 1.5})]', True),
    ("[f(n=2), f(n=3)]", True),
    ("[f(n=1)]", False),
    ("[f(n=2, unit=3)]", False),
    ('[f(unit="X", n=2)]', False),
    ('[f(unit="C")]', False),
    ("[g(n=2)]", False),
]
GEMMA = [
    ("call:f{n:2}", True),
    ("call:f{unit:'C',n:12,node:{name:'a',next:{name:'}'}},any:[1,{b:null,c:'x'}]}", True),
    ("call:f{unit:['x'],n:2,either:[null,null]}", True),
    ("call:f{n:2,either:'x',kinds:true,map:{x:1.5,y:2}}", True),
    ("call:f{n:2,kinds:''}", True),
    ("call:f{n:2,word:'a',old:{name:'b'}}", True),
    ("call:f{n:2,word:1}", False),
    ("call:f{n:2,old:'b'}", False),
    ("call:f{n:1}", False),
    ("call:f{unit:'X',n:2}", False),
    ("call:f{unit:'C'}", False),
    ("call:f{n:2,node:{next:'x'}}", False),
    ('call:f{n:2,kinds:"x"}', False),
    ("call:g{n:2}", False),
]


@pytest.fixture(scope="module")
def llg() -> Any:
    return pytest.importorskip("llguidance")


def allows(llg: Any, name: str, pieces: list[str], special: dict[str, int]) -> bool:
    """Returns whether the grammar of forced calls allows the text. Pieces in `special` are special
    tokens."""
    builder = GrammarBuilder([Tool("f", parameters=RICH)], True, special)
    calls = tool_format(name).call_grammar(builder)
    lark = answer(calls, special=special, required=True)
    tokenizer = llg.LLTokenizer(llg.TokenizerWrapper(ByteTokenizer()))
    assert llg.LLMatcher.validate_grammar(lark, tokenizer) == ""
    ids: list[int] = []
    for piece in pieces:
        ids += [special[piece]] if piece in special else list(piece.encode())
    matcher = llg.LLMatcher(tokenizer, lark)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(("text", "valid"), PYTHON)
def test_python_arguments_must_match_their_schema(llg: Any, text: str, valid: bool) -> None:
    assert allows(llg, "pythonic", [text], {}) == valid


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize(("name", "mark"), [("functiongemma", "<escape>"), ("gemma4", '<|"|>')])
@pytest.mark.parametrize(("text", "valid"), GEMMA)
def test_gemma_arguments_must_match_their_schema(
    llg: Any, name: str, mark: str, text: str, valid: bool, special: dict[str, int]
) -> None:
    kind = tool_format(name)
    inside = [piece for part in text.split("'") for piece in (mark, part)][1:]
    pieces = [kind.start_markers[0], *inside, kind.end_markers[0]]  # type: ignore[attr-defined]
    assert allows(llg, name, pieces, special) == valid


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("gemma4", {"a": {"type": "string", "pattern": "x"}}, "'a' in the .*'f' have 'pattern'"),
        ("gemma4", {"a": {"type": "array", "maxItems": 2}}, "have 'maxItems'"),
        ("gemma4", {"a": {"$ref": "#/properties/b"}}, "refers? to '#/properties/b'"),
        ("gemma4", {"a": {"enum": [{"b": 1}]}}, "objects in an enum"),
        ("gemma4", {"a": {"enum": ["b", "cd"], "minLength": 2}}, "'minLength' in their schema"),
        ("gemma4", {"a-b": {}}, "property 'a-b'"),
        ("functiongemma", {"a": False}, "schema False"),
        ("pythonic", {"not a name": {}}, "property 'not a name'"),
        ("pythonic", {"a": {"$ref": "#/properties/b"}}, "refers? to '#/properties/b'"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_named(
    name: str, schema: dict[str, Any], message: str
) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": schema})
    with pytest.raises(ValueError, match=message):
        tool_format(name).call_grammar(GrammarBuilder([tool], True, {}))


@pytest.mark.parametrize("name", ["pythonic", "gemma4"])
def test_combined_schemas_at_the_top_are_named(name: str) -> None:
    tool = Tool("f", parameters={"type": "object", "anyOf": [{"required": ["a"]}]})
    with pytest.raises(ValueError, match="parameters of tool 'f' have 'anyOf'"):
        tool_format(name).call_grammar(GrammarBuilder([tool], True, {}))


def test_a_schema_inside_itself_is_bounded() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    tool = Tool("f", parameters={"type": "object", "properties": {"a": schema}})
    with pytest.raises(ValueError, match="more than 32 levels"):
        tool_format("gemma4").call_grammar(GrammarBuilder([tool], True, {}))
