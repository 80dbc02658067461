"""The checks of the peers' tests, which have one model, for each kind of tokenizer. The models are
random, so their outputs are constrained by grammars or compared with each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.conformance.peers.requests import (
    CHAT,
    COMPLETIONS,
    FORM,
    RESPONSES,
    SEARCH,
    WEATHER,
    events,
    ok,
)
from tests.conformance.peers.test_tools import calls_of
from tests.model_kinds import MODEL_KINDS, ModelKind, model_kind

pytestmark = pytest.mark.slow

SHORT = ("llama2", "qwen3", "mistral_v7")
CHOSEN = MODEL_KINDS if "SWELL_CONFORMANCE" in os.environ else SHORT
LITERALS = ["<think>x</think>", "<tool_call>", "[TOOL_CALLS]", "plain"]
QUERY = [{"role": "user", "content": "The weather?"}]
REASONING_ENDS = {
    "think": "</think>",
    "think-open": "</think>",
    "mistral": "[/THINK]",
    "harmony": "<|end|>",
}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Served:
    """A server of one kind of tokenizer."""

    def __init__(self, in_process_server: InProcessServer, kind: ModelKind) -> None:
        self.in_process_server = in_process_server
        self.kind = kind

    @property
    def tokenizer(self) -> Any:
        return self.kind.tokenizer

    def post(self, path: str, **body: Any) -> Any:
        plain = {} if "token" in path else {"temperature": 0}
        return self.in_process_server.client.post(
            path, json={**plain, **body, "model": self.kind.name}
        )

    @property
    def brief(self) -> dict[str, Any]:
        """Returns parameters that make a random model end its reasoning as soon as it has begun."""
        if self.kind.reasoning is None:
            return {}
        end = self.tokenizer.convert_tokens_to_ids(REASONING_ENDS[self.kind.reasoning])
        return {"logit_bias": {str(end): 100}}

    def chat(self, **body: Any) -> Any:
        (choice,) = ok(self.post(CHAT, messages=QUERY, **self.brief, **body))["choices"]
        return choice["message"]

    def calls(self, stream: bool, **body: Any) -> Any:
        if self.kind.tools is None:
            pytest.skip("its template shows no tools")
        body = {"tools": [WEATHER, SEARCH], "max_tokens": 400, **self.brief, **body}
        body |= {"messages": QUERY}
        return calls_of(self.post(CHAT, **body, stream=stream), stream)


@pytest.fixture(scope="module", params=CHOSEN)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    one = model_kind(request.param)
    with start_in_process_server(
        one.folder(), **{"model.max_model_len": 4096}
    ) as in_process_server:
        yield Served(in_process_server, one)


@pytest.mark.parametrize("prompt", ["The sky", " is", "def f():\n    return 1", "🚀 x"])
def test_echo_begins_with_the_prompt(served: Served, prompt: str) -> None:
    """SGLang test_openai_server.py::test_completion: the prompt as it was sent, without the tokens
    that the tokenizer puts before it"""
    body = {"prompt": prompt, "echo": True, "max_tokens": 6, "logprobs": 1}
    (choice,) = ok(served.post(COMPLETIONS, **body))["choices"]
    assert choice["text"].startswith(prompt)
    assert choice["logprobs"]["text_offset"][0] == 0


@pytest.mark.parametrize("prompt", ["The sky", "a\n  b"])
def test_a_completion_continues_its_prompt(served: Served, prompt: str) -> None:
    """vLLM test_completion.py: prompt and answer together are the decoded text of all their
    tokens"""
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ok(served.post(COMPLETIONS, **body))["choices"]
    before, ids = choice["prompt_token_ids"], choice["token_ids"]
    decode = served.tokenizer.decode
    whole = decode(before + ids, skip_special_tokens=True)
    held = decode(before, skip_special_tokens=True)
    if "\ufffd" not in whole:
        assert held + choice["text"] == whole


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_equals_the_whole_answer(served: Served, logprobs: int | None) -> None:
    """vLLM test_completion.py::test_completion_streaming"""
    body = {"prompt": "The sky", "max_tokens": 40, "ignore_eos": True, "logprobs": logprobs}
    (whole,) = ok(served.post(COMPLETIONS, **body))["choices"]
    parts = [chunk["choices"][0] for chunk in events(served.post(COMPLETIONS, **body, stream=True))]
    assert "".join(part["text"] for part in parts) == whole["text"]
    if logprobs is not None:
        response = [part["logprobs"] for part in parts if part["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [one for part in response for one in part[name]] == whole["logprobs"][name]


def test_a_chat_stream_equals_the_whole_answer(served: Served) -> None:
    """vLLM test_chat.py::test_chat_streaming"""
    body = {"messages": QUERY, "max_tokens": 40, "ignore_eos": True}
    whole = ok(served.post(CHAT, **body))["choices"][0]["message"]
    texts = {"content": "", "reasoning_content": ""}
    for chunk in events(served.post(CHAT, **body, stream=True)):
        for name in texts:
            texts[name] += chunk["choices"][0]["delta"].get(name) or ""
    assert texts["content"] == (whole["content"] or "")
    assert texts["reasoning_content"] == (whole.get("reasoning_content") or "")


@STREAMED
@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
def test_a_forced_call(served: Served, named: bool, stream: bool) -> None:
    """vLLM test_completion_with_function_calling.py::test_function_tool_use"""
    choice = {"type": "function", "function": {"name": "search"}} if named else "required"
    more = {"tool_choice": choice, "parallel_tool_calls": False}
    calls, reasons, text = served.calls(stream, **more)
    assert len(calls) == 1 and text.strip() == "" and reasons in (["tool_calls"], ["stop"])
    function = calls[0]["function"]
    (schema,) = [
        tool["function"]["parameters"]
        for tool in (WEATHER, SEARCH)
        if tool["function"]["name"] == function["name"]  # type: ignore[index]
    ]
    jsonschema.validate(json.loads(function["arguments"]), schema)
    assert not named or function["name"] == "search"


def test_a_forced_call_over_responses(served: Served) -> None:
    """vLLM responses/test_function_call.py::test_function_tool_use, and back"""
    if served.kind.tools is None:
        pytest.skip("its template shows no tools")
    tool = {"type": "function", **SEARCH["function"]}  # type: ignore[dict-item]
    more = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    answer = ok(served.post(RESPONSES, input=QUERY, **more, **served.brief, max_output_tokens=200))
    call = answer["output"][-1]
    assert call["type"] == "function_call" and call["name"] == "search"
    jsonschema.validate(json.loads(call["arguments"]), tool["parameters"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    turns = [*QUERY, *answer["output"], result]
    ok(served.post(RESPONSES, input=turns, tools=[tool], max_output_tokens=4))


def test_a_streamed_call_equals_the_whole_one(served: Served) -> None:
    """vLLM test_tool_calls.py::test_tool_call_and_choice"""
    whole, streamed = (served.calls(stream, tool_choice="required")[0] for stream in (False, True))
    assert [one["function"] for one in whole] == [one["function"] for one in streamed]


def test_calls_are_accepted_as_history(served: Served) -> None:
    """vLLM test_tool_calls.py::test_tool_call_with_results"""
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    calls, _, _ = served.calls(False, **more)
    content = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**calls[0], "type": "function"}],
    }
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "20"}
    body = {"messages": [*QUERY, content, result], "tools": [WEATHER, SEARCH], "max_tokens": 4}
    ok(served.post(CHAT, **body))


def test_a_form(served: Served) -> None:
    """vLLM test_chat.py::test_structured_outputs_json_chat"""
    message = served.chat(structured_outputs={"json": FORM}, max_tokens=200)
    jsonschema.validate(json.loads(message["content"]), FORM)


@pytest.mark.parametrize("regex", [r" is [a-c]{3}", r"    x\n  y", r"<think>[a-c]</think>"])
def test_a_regex_of_a_completion(served: Served, regex: str) -> None:
    """vLLM test_completion.py: text that begins with blanks, or contains the name of a token"""
    body = {"prompt": "The sky", "structured_outputs": {"regex": regex}, "max_tokens": 40}
    (choice,) = ok(served.post(COMPLETIONS, **body))["choices"]
    assert re.fullmatch(regex, choice["text"])


@pytest.mark.parametrize("literal", LITERALS)
def test_a_choice(served: Served, literal: str) -> None:
    """vLLM test_chat.py::test_structured_outputs_choice_chat, with texts that are names of
    tokens"""
    body = {"prompt": "x", "structured_outputs": {"choice": [literal]}, "max_tokens": 40}
    (choice,) = ok(served.post(COMPLETIONS, **body))["choices"]
    assert choice["text"] == literal and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("tools", [None, [SEARCH]], ids=["plain", "tools"])
def test_tokens_of_a_conversation(served: Served, tools: Any) -> None:
    """vLLM test_tokenization.py::test_tokenize_chat, test_tokenize_chat_with_tools"""
    if tools and served.kind.tools is None:
        pytest.skip("its template shows no tools")
    response = ok(served.post("/tokenize", messages=QUERY, tools=tools, add_generation_prompt=True))
    how = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
    assert response["tokens"] == served.tokenizer.apply_chat_template(QUERY, **how)


@pytest.mark.parametrize("text", ["The sky is blue.", " leading", "two  blanks", "naïve 🚀"])
def test_decoded_tokens_encode_to_the_same_tokens(served: Served, text: str) -> None:
    """vLLM test_tokenization.py::test_detokenize"""
    ids = ok(served.post("/tokenize", prompt=text, add_special_tokens=False))["tokens"]
    assert ids == served.tokenizer.encode(text, add_special_tokens=False)
    response = ok(served.post("/detokenize", tokens=ids))["prompt"]
    assert response == served.tokenizer.decode(ids)


def test_a_message_is_continued(served: Served) -> None:
    """SGLang test_openai_server.py::test_response_prefill: the constraint applies to the
    continuation"""
    turns = [*QUERY, {"role": "assistant", "content": "The sky"}]
    form = {"structured_outputs": {"choice": [" is blue"]}}
    body = {
        "messages": turns,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    (choice,) = ok(served.post(CHAT, **body, **form, **served.brief, max_tokens=20))["choices"]
    assert choice["message"]["content"] == " is blue"


@STREAMED
def test_stop_texts(served: Served, stream: bool) -> None:
    """SGLang test_matched_stop.py::test_finish_stop_str"""
    form = {"structured_outputs": {"choice": ["one two three"]}, "stop": [" two"]}
    answer = served.post(COMPLETIONS, prompt="x", max_tokens=40, **form, stream=stream)
    parts = events(answer) if stream else [ok(answer)]
    last = parts[-1]["choices"][0]
    assert "".join(part["choices"][0]["text"] for part in parts) == "one"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", " two")
