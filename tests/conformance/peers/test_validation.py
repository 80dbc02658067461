"""Refusals and their errors: after vLLM's tests of errors and validation, SGLang's test_protocol.py
and Ray Serve LLM's test_router.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.in_process_server import MAX_BODY_BYTES, MODEL, InProcessServer
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.requests import CHAT, COMPLETIONS, PLAIN, UPPER, ok, refused

pytestmark = pytest.mark.slow

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.mark.parametrize("body", [b'"not an object"', b'["a"]', b"42", b"null", b"{{{", b""])
@PATHS
def test_bodies_other_than_an_object_are_refused(
    in_process_server: InProcessServer, path: str, body: bytes
) -> None:
    """vLLM test_non_object_body_validation.py; Ray test_router.py::
    test_unresolvable_model_is_rejected_before_replica_selection"""
    headers = {"content-type": "application/json"}
    refused(in_process_server.client.post(path, content=body, headers=headers))


@PATHS
def test_an_empty_salt(post: Post, path: str) -> None:
    """vLLM test_non_object_body_validation.py::
    test_chat_completion_request_cache_salt_still_validated_on_dict"""
    assert refused(post(path, **PLAIN[path], cache_salt=""))["param"] == "cache_salt"


@PATHS
@pytest.mark.parametrize("model", ["another", 123, ["nano"], ""])
def test_invalid_models_are_refused(post: Post, path: str, model: Any) -> None:
    """vLLM test_serving_models.py; Ray test_router.py: 404 by name, 400 by type"""
    status = 404 if model == "another" else 400
    answer = post(path, **PLAIN[path], model=model)
    assert answer.status_code in (status, 404), answer.text
    assert "model" in answer.json()["error"]["message"]


@PATHS
def test_the_only_model_needs_no_name(in_process_server: InProcessServer, path: str) -> None:
    """vLLM; Ray test_router.py::test_sole_model_is_default_when_model_omitted"""
    body = PLAIN[path] | {"max_tokens": 1}
    assert ok(in_process_server.client.post(path, json=body))["model"] == MODEL
    assert ok(in_process_server.client.post(path, json=body | {"model": None}))["model"] == MODEL


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [""], "", [-1], [[-1]], [999999], [[999999]], 3, {"a": 1}, ["a", 1]]
)
def test_invalid_prompts_are_refused(post: Post, prompt: Any) -> None:
    """vLLM test_prompt_validation.py::test_empty_prompt, test_out_of_vocab_token_ids;
    test_completion_error.py::test_negative_prompt_token_ids_*; test_empty_prompt_list.py"""
    error = refused(post(COMPLETIONS, prompt=prompt))
    assert (error["param"] or "").startswith("prompt")


def test_no_prompt(in_process_server: InProcessServer) -> None:
    """SGLang test_protocol.py::test_completion_request_validation_errors"""
    error = refused(in_process_server.client.post(COMPLETIONS, json={"model": MODEL}))
    assert "prompt" in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [{"content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "bogus"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [*UPPER, {"role": "tool", "content": "x", "tool_call_id": ""}],
    ],
)
def test_invalid_messages_are_refused(post: Post, messages: Any) -> None:
    """vLLM test_chat_error.py, SGLang test_serving_chat.py, Ray test_router.py"""
    error = refused(post(CHAT, messages=messages))
    assert (error["param"] or "").startswith("messages")


@PATHS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 1.1),
        ("n", 0),
        ("n", -1),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("seed", "x"),
        ("stream", "x"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"321": 1}),
        ("logit_bias", [1]),
        ("stop_token_ids", [321]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("bad_words", 3),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [321]),
        ("response_format", {"type": "bogus"}),
        ("response_format", "json"),
        ("prompt_logprobs", -2),
        ("priority", "x"),
        ("data_parallel_rank", 7),
        ("data_parallel_rank", -1),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("an_unknown_name", 1),
    ],
)
def test_invalid_values_are_refused(post: Post, path: str, name: str, value: Any) -> None:
    """vLLM test_chat_logit_bias_validation.py, test_chat_stop_token_ids_validation.py,
    test_sampling_params; SGLang test_protocol.py::test_negative_token_limits: a 400 that names the
    field"""
    answer = post(path, **PLAIN[path], **{name: value})
    assert name in refused(answer)["message"]


def test_a_bias_outside_the_limits_names_them(post: Post) -> None:
    """vLLM test_chat_logit_bias_validation.py::test_chat_logit_bias_invalid"""
    message = refused(post(CHAT, messages=UPPER, logit_bias={"321": 1}))["message"]
    assert "321" in message and "319" in message


@PATHS
def test_edges_of_the_vocabulary(post: Post, path: str) -> None:
    """vLLM test_chat_logit_bias_validation.py::test_chat_logit_bias_valid,
    test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_valid"""
    more = {"logit_bias": {"319": 1.0}, "stop_token_ids": [319], "max_tokens": 2}
    ok(post(path, **PLAIN[path], **more))


@PATHS
def test_prompts_beyond_the_context(post: Post, path: str) -> None:
    """SGLang test_request_length_validation.py::test_input_length_longer_than_context_length"""
    text = "hello " * 400
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [UPPER[0] | {"content": text}]}
    assert "maximum context length is 2048" in refused(post(path, **body))["message"]


def test_answers_beyond_the_context(post: Post) -> None:
    """SGLang test_request_length_validation.py::test_max_tokens_validation"""
    message = refused(post(CHAT, messages=UPPER, max_tokens=4000))["message"]
    assert "max_tokens=4000" in message and "maximum context length is 2048" in message


def test_bodies_beyond_their_limit(post: Post) -> None:
    """SGLang test_request_body_validation.py"""
    answer = post(CHAT, messages=[UPPER[0] | {"content": "x" * MAX_BODY_BYTES}])
    assert "body" in refused(answer, 413)["message"]


@PATHS
def test_at_least_more_than_at_most(post: Post, path: str) -> None:
    """vLLM sampling_params: min_tokens above max_tokens"""
    assert "min_tokens" in refused(post(path, **PLAIN[path], min_tokens=5, max_tokens=2))["message"]


@PATHS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 0),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 0),
        ("stop", ""),
        ("stop", []),
        ("stop", ["a", "b", "c", "d"]),
        ("logit_bias", {}),
        ("user", "me"),
        ("length_penalty", 1.0),
        ("spaces_between_special_tokens", True),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("request_id", "mine"),
        ("priority", 0),
        ("truncate_prompt_tokens", 4),
        ("truncate_prompt_tokens", -1),
        ("add_special_tokens", False),
        ("use_beam_search", False),
        ("early_stopping", False),
        ("lora_path", None),
        ("guided_json", None),
        ("return_tokens_as_token_ids", True),
        ("service_tier", "auto"),
        ("best_of", 1),
        ("bad_words", ["xyz"]),
        ("allowed_token_ids", [65, 66, 260]),
        ("kv_transfer_params", None),
        ("vllm_xargs", None),
        ("return_token_ids", None),
        ("ignore_eos", False),
        ("seed", 0),
        ("logprobs", None),
    ],
)
def test_valid_values_are_accepted(post: Post, path: str, name: str, value: Any) -> None:
    """vLLM and SGLang protocols: fields that clients send routinely, or that have the same meaning
    here"""
    ok(post(path, **PLAIN[path], **{"max_tokens": 2, name: value}))


@PATHS
@pytest.mark.parametrize(
    ("name", "value"),
    [("lora_path", "x"), ("return_hidden_states", True), ("length_penalty", 2.0)],
)
def test_values_that_would_change_the_answer(post: Post, path: str, name: str, value: Any) -> None:
    """A field for a feature that does not exist here is refused by its name."""
    assert name in refused(post(path, **PLAIN[path], **{name: value}))["message"]
