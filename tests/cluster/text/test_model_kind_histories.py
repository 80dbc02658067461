"""Histories from other programs, as the chat templates of each kind of model render them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.chat_template import ChatTemplate, TemplateOptions
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.prompt.truncation import TokenizeOptions, Truncation
from swell.cluster.text.schema.decode import decode
from tests.model_kinds import MODEL_KINDS, model_kind

USER = {"role": "user", "content": "hi"}
CALLING = [name for name in MODEL_KINDS if model_kind(name).tools is not None]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def written(name: str, *messages: Any) -> str:
    body = {"messages": [USER, *messages], "tools": [TOOL]}
    request = decode(json.dumps(body).encode(), ChatCompletionRequest)
    options = TemplateOptions(tools=request.tools or (), add_generation_prompt=False)
    return ChatTemplate(model_kind(name).tokenizer, name).render(request.messages, options)


def called(arguments: str) -> list[dict[str, Any]]:
    # Nine letters and digits: the strictest templates accept only such an id.
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "nine"},
    ]


@pytest.mark.parametrize("name", CALLING)
def test_cut_off_arguments_are_written_as_their_longest_object(name: str) -> None:
    whole = written(name, *called('{"at": 3, "of": ["a"]}'))
    assert written(name, *called('{"at": 3, "of": ["a"], "as": "unfinis')) == whole
    assert "look" in whole and "nine" in whole
    assert written(name, *called("no JSON at all")) == written(name, *called("{}"))


@pytest.mark.parametrize("name", CALLING)
def test_the_older_form_of_a_call_is_written_as_the_newer(name: str) -> None:
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": ""}},
        {"role": "function", "name": "look", "content": "nine"},
    ]
    text = written(name, *older)
    assert "look" in text and "nine" in text
    assert text.replace("call00001", "call12345") == written(name, *called(""))


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_a_custom_role_is_rendered_or_refused(name: str) -> None:
    """A message with a custom role is never silently dropped."""
    refused = None
    text = ""
    try:
        text = written(name, {"role": "critic", "content": "far too long"}, USER)
    except BadRequest as error:
        refused = error.param
    assert ("far too long" in text) != (refused in ("messages", "messages[1].role"))


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_special_tokens_are_added_and_prompts_are_cut(name: str) -> None:
    tokenizer = model_kind(name).tokenizer
    prompts = PromptProcessor(tokenizer, 64, len(tokenizer), name)
    text = "the quick brown fox jumps over the lazy dog. " * 9
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    marked = tokenizer(text)["input_ids"]
    assert len(whole) > 64
    for add, ids in ((False, whole), (True, marked)):
        for side, cut in (("left", ids[-20:]), ("right", ids[:20])):
            options = TokenizeOptions(add, Truncation(20, side, 1))  # type: ignore[arg-type]
            assert prompts.completion_prompts([text], options) == [cut]
    window = TokenizeOptions(False, Truncation(-1, "left", 10))
    assert prompts.completion_prompts([text], window) == [whole[-54:]]


@pytest.mark.parametrize("name", CALLING)
def test_calls_made_at_once_are_written_with_their_results(name: str) -> None:
    """If a template accepts only one call per message, each call gets its own message."""
    calls, results = [], []
    for id, kind_of in (("call12345", "first"), ("call12346", "second")):
        function = {"name": "look", "arguments": json.dumps({"at": kind_of})}
        calls.append({"id": id, "type": "function", "function": function})
        content = f"{kind_of} result"
        results.append({"role": "tool", "tool_call_id": id, "name": "look", "content": content})
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    text = written(name, called, *reversed(results), {"role": "user", "content": "more"})
    for part in ("first", "second", "first result", "second result"):
        assert part in text
