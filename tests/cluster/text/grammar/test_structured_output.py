"""Structured outputs: each format becomes a grammar of exactly that format, or is refused."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.lark_compiler import MAX_BYTES, compile_lark
from swell.cluster.text.grammar.structured_output import (
    MAX_CHOICES,
    MAX_SCHEMA_DEPTH,
    compile_grammar,
    inline_json,
)
from swell.cluster.text.grammar.user_grammar import MAX_GBNF_BYTES
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.worker.sample.vocabulary import load_vocabulary
from tests.support import paths
from tests.support.structured_schemas import SCHEMAS

pytestmark = pytest.mark.slow

NANO = str(paths.NANO)


def accepts(source: str, text: str) -> bool:
    """Returns whether llguidance accepts a text, with one token per byte."""
    matcher = LLMatcher(load_vocabulary(NANO), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def lark(**form) -> str:
    return compile_grammar(StructuredOutputs(**form)).lark


def refused(**form) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        compile_grammar(StructuredOutputs(**form))
    return caught.value


# -------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_value_is_accepted_in_every_usual_notation(name):
    schema, value = SCHEMAS[name]
    jsonschema.Draft202012Validator(schema).validate(value)
    source = lark(json=schema)
    assert source == lark(json=json.dumps(schema)), "text and object are the same"
    indents = [None, 2, 4] if name != "deep" else [None, 1]
    for indent in indents:
        assert accepts(source, json.dumps(value, ensure_ascii=False, indent=indent))
    assert accepts(source, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def test_whitespace_has_bounds():
    source = lark(json={"type": "array", "items": {"type": "null"}})
    assert accepts(source, "[ null,\n" + 32 * " " + "null ]")
    for blank in ("  ", "\n\n", "\n" + 33 * " ", "\t", "\r\n"):
        assert not accepts(source, f"[{blank}null]")
    assert not accepts(source, " []")
    assert not accepts(source, "[]\n")


def test_a_schema_cannot_lift_the_bounds_of_whitespace():
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert not accepts(lark(json=schema), "[  ]")


def test_an_object_is_any_object_and_nothing_else():
    source = lark(json_object=True)
    assert accepts(source, '{"a": [1, {"b": null}]}')
    assert not accepts(source, "[1]")


def test_the_field_of_an_invalid_grammar_is_named():
    with pytest.raises(BadRequest) as caught:
        compile_grammar(StructuredOutputs(json={"type": "x"}), "response_format.json_schema.schema")
    assert caught.value.param == "response_format.json_schema.schema"
    assert "response_format.json_schema.schema" in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.org/schema.json"},
        {"properties": {"a": {"items": [{"$ref": "other.json#/$defs/a"}]}}},
        {"anyOf": [{"$dynamicRef": "http://x/y"}]},
    ],
)
def test_remote_references_are_not_fetched(schema):
    message = refused(json=schema).message
    reference = re.search(r'ef": "([^"]+)"', json.dumps(schema))
    assert reference is not None and reference[1] in message
    assert "the server fetches no schemas" in message


def test_data_that_looks_like_a_reference_is_plain_data():
    value = {"$ref": "https://example.org"}
    assert accepts(lark(json={"const": value}), json.dumps(value))


def _nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_schemas_have_limits():
    assert lark(json=_nested(MAX_SCHEMA_DEPTH))
    assert str(MAX_SCHEMA_DEPTH) in refused(json=_nested(MAX_SCHEMA_DEPTH + 1)).message
    assert (
        "nested" in refused(json="[" * 100_000).message or "JSON" in refused(json="[" * 9).message
    )
    for form in ({"json": {"const": "x" * MAX_BYTES}}, {"json": '"' + "x" * MAX_BYTES + '"'}):
        assert str(MAX_BYTES) in refused(**form).message


@pytest.mark.parametrize(
    "text", ["", "{", "nul", '{"a": NaN}', "{'a': 1}", "[]", "3", '"x"', "null"]
)
def test_invalid_schema_texts_are_refused(text):
    assert refused(json=text).param == "structured_outputs.json"


@pytest.mark.parametrize("schema", ["true", "false"])
def test_schemas_may_be_booleans_in_text(schema):
    if schema == "true":
        assert accepts(lark(json=schema), "[1]")
    else:
        assert "no answer" in refused(json=schema).message


# ----------------------------------------------------------------------- regex, choice, grammar


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"a|b", ["a", "b"], ["ab", ""]),
        (r"^a|b$", ["a", "b"], ["ab"]),
        (r"\d+/\d+", ["1/2"], ["١/٢", "1\\/2"]),
        (r"(?s:.)*", ["a\nb", ""], []),
        (r".*", ["a b"], ["a\nb"]),
        (r"\/[\/]", ["//"], ["\\/"]),
        ('say "x"\n', ['say "x"\n'], ["say x"]),
        (r"#//\#", ["#//#"], ["#"]),
    ],
)
def test_a_regex_is_the_whole_answer(pattern, yes, no):
    source = lark(regex=pattern)
    assert [text for text in yes if not accepts(source, text)] == []
    assert [text for text in no if accepts(source, text)] == []


@pytest.mark.parametrize("pattern", ["", "(", r"(a)\1", "(?=a)b", "a{3,1}", "[z-a]", "\ud800"])
def test_unsupported_regexes_are_refused(pattern):
    assert refused(regex=pattern).param == "structured_outputs.regex"


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5), texts)
@example(["\x7f", "a\\\x7f"], "\\x7f")
def test_a_choice_is_exactly_its_texts(choices, other):
    source = lark(choice=choices)
    assert all(accepts(source, text) for text in choices)
    assert accepts(source, other) == (other in choices)


def test_choices_have_limits():
    many = [f"choice {i}" for i in range(MAX_CHOICES)]
    assert accepts(lark(choice=many), many[-1])
    assert str(MAX_CHOICES) in refused(choice=[*many, "more"]).message
    assert refused(choice=["a", ""]).param == "structured_outputs.choice[1]"
    assert refused(choice=[]).param == "structured_outputs.choice"


GBNF = [
    ('root ::= "a" | b\nb ::= [0-9]+ "\\n"', ["a", "12\n"], ["", "12"]),
    ('# numbers\nroot ::= (x " ")+ # more\nx ::= "q" | "(" root ")"', ["q (q ) "], ["q"]),
    ('root ::= "\\u00e9\\x41" [\\u00e0-\\u00fc]{2}', ["éAéü"], ["éAé"]),
    ('root ::= "\\"\\\\" [^"\\]/] .', ['"\\ax'], ['"\\]x', '"\\/x']),
    ('root ::= "\\x22\\x5c" "tab\\t"', ['"\\tab\t'], []),
]


@pytest.mark.parametrize(("source", "yes", "no"), GBNF)
def test_gbnf_is_converted(source, yes, no):
    converted = lark(grammar=source)
    assert [text for text in yes if not accepts(converted, text)] == []
    assert [text for text in no if accepts(converted, text)] == []


@pytest.mark.parametrize(
    "source",
    [
        "",
        "start: missing",
        'rule: "no start"',
        'start: "open',
        'a ::= "no root"',
        "root ::= missing",
        "root ::= (" * 3000,
        "root ::= " + '"a" ' * MAX_GBNF_BYTES,
        'start: %json {"type": "x"}',
        "start: <|end|>",
        'start: "a" <[260]>',
        'start: "a" <[\x1c260]>',
        "start: /a\nb/ <[260]> /c\nd/",
        'start: "a" // "\nb: <[260]> // "',
        'start: /"/ <[260]> /"/',
        'start: "/" <[260]> "/"',
        "start: /\\// <[260]> /\\//",
        "start: %lark {start: <[260]>}",
        "start: @form",
        "start: @0",
        '{"grammars": [{"lark_grammar": "start: <[260]>"}]}',
        ' \n{"grammars": [{"lark_grammar": "start: \'a\'"}]}',
        '\u00a0{"grammars": [{"lark_grammar": "start: <[260]>"}]}',
        '\ufeff{"grammars": [{"lark_grammar": "start: <[260]>"}]}',
        '[{"grammars": [{"lark_grammar": "start: <[260]>"}]}]',
        "start: /\ud800/",
    ],
)
def test_unsupported_grammars_are_refused(source):
    error = refused(grammar=source)
    assert error.param == "structured_outputs.grammar"
    assert len(error.message) < 500


def test_text_that_only_looks_like_a_token_is_text():
    source = lark(grammar='start: "<a>" /<b>|[<]c>/ // <d>\n# <e>\n')
    assert accepts(source, "<a><b>")
    assert accepts(lark(grammar="start: /a\n<b>/ /[<]c\n>/"), "a\n<b><c\n>")


def test_lark_from_elsewhere_may_name_tokens_and_hold_schemas():
    rule = inline_json({"type": "array", "items": {"type": "null"}})
    source = compile_lark(f"start: <[260]>? args\nargs: {rule}", "tools").lark
    assert accepts(source, "[null]") and not accepts(source, "[  null]")
    with pytest.raises(BadRequest) as caught:
        compile_lark("start: oops", "tools")
    assert caught.value.param == "tools" and "oops" in caught.value.message


# ---------------------------------------------------------------------------- exactly one kind


def test_exactly_one_kind_of_structure_is_required():
    assert "json and regex" in refused(json={}, regex="a").message
    assert "none" in refused().message
    assert "none" in refused(json_object=False).message
    assert lark(json_object=False, regex="a")


# ------------------------------------------------------------------------------------- answers

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "city": {"type": ["string", "null"]},
    },
    "required": ["name", "age", "tags", "city"],
    "additionalProperties": False,
}
PEOPLE = [
    ("Ezasupo", 8, "Adin"),
    ("Bo", 71, "Ur"),
    ("Kalimeno", 33, "Troverana"),
]


def run(**overrides) -> list[list[int]]:
    """Samples at temperature 1.5, each kind of format next to rows without one."""
    forms = [
        StructuredOutputs(json=SCHEMA),
        None,
        StructuredOutputs(regex="[a-z]{3,20}!"),
        StructuredOutputs(choice=["yes", "no", "not at all"]),
    ]
    talks, params = [], []
    for i in range(16):
        name, age, city = PEOPLE[i % 3]
        text = f"json name, age, city: {name} is {age} years old and lives in {city}."
        talks.append([{"role": "user", "content": text}])
        params_of_row = SamplingParams(
            temperature=1.5, seed=i, max_tokens=200, structured_outputs=forms[i % len(forms)]
        )
        params.append(params_of_row)
    with LLM(NANO, **{"model.device": "cpu", "scheduler.max_rows": 8, **overrides}) as llm:
        answers = llm.chat(talks, params)
        llm.check_idle()
        scarce = "cache.memory_bytes" in overrides
        assert (llm._engine.core.scheduler.num_preemptions > 0) == scarce
    for i in range(0, 16, 4):
        jsonschema.validate(json.loads(answers[i].outputs[0].text), SCHEMA)
        assert re.fullmatch("[a-z]{3,20}!", answers[i + 2].outputs[0].text)
        assert answers[i + 3].outputs[0].text in ("yes", "no", "not at all")
        assert {answers[i + k].outputs[0].finish_reason for k in (0, 2, 3)} == {"stop"}
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.fixture(scope="module")
def one_step_at_a_time() -> list[list[int]]:
    return run(**{"scheduler.steps_in_flight": 1})


@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduler.steps_in_flight": 2},
        {"scheduler.steps_in_flight": 3, "scheduler.max_chunk_tokens": 7},
        {"parallel.tensor": 2, "scheduler.steps_in_flight": 2},
        {"parallel.pipeline": 2, "scheduler.steps_in_flight": 2},
        {"cache.memory_bytes": 900_000, "scheduler.steps_in_flight": 2},
    ],
    ids=["depth 2", "depth 3, chunks", "tensor 2", "pipeline 2", "preemption"],
)
def test_answers_do_not_depend_on_the_schedule(overrides, one_step_at_a_time):
    assert run(**overrides) == one_step_at_a_time


def test_invalid_structures_are_refused_before_anything_is_computed():
    with LLM(NANO, **{"model.device": "cpu"}) as llm:
        params_of_row = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "shoe"}))
        with pytest.raises(BadRequest, match="has type 'shoe', which is not"):
            llm.generate(["one", "two"], [SamplingParams(), params_of_row])
        llm.check_idle()
