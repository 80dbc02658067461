"""Structured outputs: after vLLM's test_chat.py, test_completion.py, and SGLang's features of JSON,
EBNF and regular expressions."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.conformance.peers.conftest import Post
from tests.conformance.peers.differences import differs
from tests.conformance.peers.requests import (
    CHAT,
    COMPLETIONS,
    FORM,
    PLAIN,
    WEATHER,
    choices,
    events,
    ok,
    refused,
)

pytestmark = pytest.mark.slow

CHOICES = ["Python", "Java", "C++"]
IP = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
SQL = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def text_of(answer: Any) -> str:
    (choice,) = answer["choices"]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def complete(post: Post, path: str, **more: Any) -> str:
    return text_of(ok(post(path, **PLAIN[path], **{"max_tokens": 100, **more})))


@PATHS
def test_choice(post: Post, path: str) -> None:
    """vLLM test_chat.py::test_structured_outputs_choice_chat"""
    assert complete(post, path, structured_outputs={"choice": CHOICES}) in CHOICES


@PATHS
def test_json(post: Post, path: str) -> None:
    """vLLM test_chat.py::test_structured_outputs_json_chat"""
    jsonschema.validate(json.loads(complete(post, path, structured_outputs={"json": FORM})), FORM)


@PATHS
def test_regex(post: Post, path: str) -> None:
    """vLLM test_chat.py::test_structured_outputs_regex_chat"""
    assert re.fullmatch(IP, complete(post, path, structured_outputs={"regex": IP}))


@PATHS
def test_grammar(post: Post, path: str) -> None:
    """vLLM test_completion.py: a grammar in llama.cpp's format (GBNF)"""
    text = complete(post, path, structured_outputs={"grammar": SQL})
    assert re.fullmatch(r"SELECT col_\d from table_\d", text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_choice", CHOICES),
        ("guided_json", FORM),
        ("guided_json", json.dumps(FORM)),
        ("guided_regex", IP),
        ("guided_grammar", SQL),
        ("regex", IP),
        ("ebnf", SQL),
        ("json_schema", json.dumps(FORM)),
    ],
)
@PATHS
def test_older_names(post: Post, path: str, name: str, value: Any) -> None:
    """vLLM test_completion.py::test_guided_*; SGLang test_openai_server.py::test_regex,
    test_openai_server_ebnf.py::test_ebnf, test_json_constrained.py"""
    text = complete(post, path, **{name: value})
    kind = name.removeprefix("guided_")
    if kind == "choice":
        assert text in CHOICES
    elif kind == "regex":
        assert re.fullmatch(IP, text)
    elif "json" in kind:
        jsonschema.validate(json.loads(text), FORM)
    else:
        assert re.fullmatch(r"SELECT col_\d from table_\d", text)


def test_strict_json_by_grammar(post: Post) -> None:
    """SGLang test_openai_server_ebnf.py::test_ebnf_strict_json"""
    grammar = 'root ::= "{" pair "}"\npair ::= "\\"name\\"" ":" text\ntext ::= "\\"" [a-z]{2} "\\""'
    text = complete(post, CHAT, structured_outputs={"grammar": grammar})
    assert re.fullmatch(r'\{"name":"[a-z]{2}"\}', text)


def test_logprobs_under_a_form(post: Post) -> None:
    """vLLM test_chat.py::test_structured_outputs_choice_chat_logprobs: all values are finite
    numbers"""
    body = {"structured_outputs": {"choice": CHOICES}, "logprobs": True, "top_logprobs": 5}
    (choice,) = ok(post(CHAT, **PLAIN[CHAT], **body))["choices"]
    for one in choice["logprobs"]["content"]:
        assert all(-9999.0 <= top["logprob"] <= 0 for top in one["top_logprobs"])


@PATHS
@pytest.mark.parametrize("stream", [False, True])
def test_response_format_json_object(post: Post, path: str, stream: bool) -> None:
    """vLLM test_chat.py::test_response_format_json_object; SGLang test_json_mode.py"""
    body = {"response_format": {"type": "json_object"}, "logit_bias": {"125": 100}}
    answer = post(path, **PLAIN[path], **body, max_tokens=50, stream=stream)
    if not stream:
        assert json.loads(text_of(ok(answer))) == {}
        return
    parts = choices(events(answer))
    texts = [one["text"] if "text" in one else one["delta"].get("content") for one in parts]
    assert json.loads("".join(text or "" for text in texts)) == {}


@PATHS
@pytest.mark.parametrize("strict", [True, False, None])
def test_response_format_json_schema(post: Post, path: str, strict: bool | None) -> None:
    """vLLM test_chat.py::test_response_format_json_schema"""
    schema = {"name": "weather", "schema": FORM, "strict": strict, "description": "x"}
    text = complete(post, path, response_format={"type": "json_schema", "json_schema": schema})
    jsonschema.validate(json.loads(text), FORM)


@PATHS
def test_response_format_text(post: Post, path: str) -> None:
    """vLLM test_chat.py::test_response_format_text"""
    assert complete(post, path, response_format={"type": "text"}) is not None


@PATHS
def test_response_format_without_its_schema(post: Post, path: str) -> None:
    """vLLM test_chat_error.py, test_completion_error.py:
    test_json_schema_response_format_missing_schema"""
    error = refused(post(path, **PLAIN[path], response_format={"type": "json_schema"}))
    assert "json_schema" in error["message"]


@differs("sglang test_protocol.py::test_chat_completion_json_format[schema beside type]")
def test_schema_next_to_its_type(post: Post) -> None:
    """SGLang test_protocol.py::test_chat_completion_json_format"""
    complete(post, CHAT, response_format={"type": "json_schema", "schema": FORM})


@PATHS
@pytest.mark.parametrize(
    "form",
    [
        {"regex": {"1": "Python"}},
        {"regex": "[.*"},
        {"json": {"type": "object", "properties": {"foo": "bar"}}},
        {"grammar": "root ::= nothing_of_this_name"},
        {"choice": []},
        {"json": {"type": "object"}, "regex": ".*"},
        {},
        3,
    ],
)
def test_invalid_response_formats_are_refused(post: Post, path: str, form: Any) -> None:
    """vLLM test_chat.py::test_structured_outputs_type_error; test_completion.py::
    test_invalid_json_schema, test_invalid_regex, test_invalid_grammar;
    test_chat_completion_request_validations.py::test_multiple_structured_outputs_rejected,
    test_invalid_structured_outputs_type_rejected"""
    refused(post(path, **PLAIN[path], structured_outputs=form))


def test_form_and_named_tool(post: Post) -> None:
    """vLLM test_chat_completion_request_validations.py::
    test_structured_outputs_with_named_tool_choice_rejected; we accept both, and the call is
    forced"""
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {"tools": [WEATHER], "tool_choice": named, "max_tokens": 100}
    answer = ok(post(CHAT, **PLAIN[CHAT], **body, structured_outputs={"json": FORM}))
    assert answer["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize("first", ["<", "{"])
def test_form_and_tools_by_choice(post: Post, first: str) -> None:
    """vLLM test_chat_completion_request_validations.py::
    test_structured_outputs_with_auto_tool_choice_allowed: a call or the form"""
    body = {"tools": [WEATHER], "structured_outputs": {"json": FORM}, "max_tokens": 200}
    bias = {str(ord(first)): 100}
    (choice,) = ok(post(CHAT, **PLAIN[CHAT], **body, logit_bias=bias))["choices"]
    if first == "<":
        assert choice["message"]["tool_calls"]
    else:
        jsonschema.validate(json.loads(choice["message"]["content"]), FORM)


def test_null_tool_choice_with_a_response_format(post: Post) -> None:
    """vLLM test_tool_choice_null.py::test_null_tool_choice_does_not_conflict_with_..."""
    assert complete(post, CHAT, structured_outputs={"json": FORM}, tool_choice=None)


@differs("sglang test_structural_tag.py")
def test_structural_tags(post: Post) -> None:
    """SGLang test_structural_tag.py"""
    tag = {"begin": "<f>", "schema": FORM, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    complete(post, CHAT, response_format=form)
