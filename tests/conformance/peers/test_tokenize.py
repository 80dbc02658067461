"""`/tokenize` and `/detokenize`: after vLLM's test_tokenization.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.conformance.in_process_server import InProcessServer
from tests.conformance.peers.conftest import MAX_MODEL_LEN, Post
from tests.conformance.peers.differences import differs
from tests.conformance.peers.requests import WEATHER, ok, refused
from tests.e2e.cluster import NANO

pytestmark = pytest.mark.slow

TALK = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "Can I ask a question? vllm1"},
]
SURE = {"role": "assistant", "content": "Sure,"}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(NANO)


@pytest.mark.parametrize("special", [False, True, None])
def test_a_text(post: Post, special: bool | None) -> None:
    """vLLM test_tokenization.py::test_tokenize_completions"""
    more = {} if special is None else {"add_special_tokens": special}
    tokenized = ok(post("/tokenize", prompt="vllm1 This is a test.", **more))
    ids = tokenizer().encode("vllm1 This is a test.", add_special_tokens=special is not False)
    assert tokenized["tokens"] == ids and tokenized["count"] == len(ids)
    assert tokenized["max_model_len"] == MAX_MODEL_LEN and tokenized["token_strs"] is None


@pytest.mark.parametrize("tools", [None, [WEATHER], [{**WEATHER, "function": {"name": "now"}}]])
@pytest.mark.parametrize("special", [False, None])
@pytest.mark.parametrize(("begins", "goes_on"), [(False, False), (True, False), (False, True)])
def test_a_conversation(
    post: Post, begins: bool, goes_on: bool, special: bool | None, tools: Any
) -> None:
    """vLLM test_tokenization.py::test_tokenize_chat, test_tokenize_chat_with_tools: the result of
    apply_chat_template, also for a tool without a description"""
    turns = [*TALK, SURE] if goes_on else TALK
    how = {"add_generation_prompt": begins, "continue_final_message": goes_on}
    more = {} if special is None else {"add_special_tokens": special}
    tokenized = ok(post("/tokenize", messages=turns, tools=tools, **how, **more))
    text = tokenizer().apply_chat_template(turns, tools=tools, tokenize=False, **how)
    assert tokenized["tokens"] == tokenizer().encode(text, add_special_tokens=False)
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == MAX_MODEL_LEN


def test_texts_of_tokens(post: Post) -> None:
    """vLLM test_tokenization.py::test_tokenize_with_return_token_strs"""
    tokenized = ok(post("/tokenize", prompt="a token_strs test!", return_token_strs=True))
    assert tokenized["token_strs"] == tokenizer().convert_ids_to_tokens(tokenized["tokens"])


@pytest.mark.parametrize("text", ["This is a test. vllm1", "🚀 x", "<|end|>"])
def test_detokenize_inverts_tokenize(post: Post, text: str) -> None:
    """vLLM test_tokenization.py::test_detokenize"""
    ids = ok(post("/tokenize", prompt=text, add_special_tokens=False))["tokens"]
    assert ok(post("/detokenize", tokens=ids)) == {"prompt": text}


@pytest.mark.parametrize("tokens", [[-1], [999], ["a"], "a", None])
def test_invalid_ids_are_refused(post: Post, tokens: Any) -> None:
    """vLLM protocol: DetokenizeRequest"""
    assert refused(post("/detokenize", tokens=tokens))["param"].startswith("tokens")


def test_a_text_or_a_conversation(post: Post) -> None:
    """vLLM protocol: TokenizeRequest has either a prompt or messages"""
    refused(post("/tokenize", prompt="a", messages=TALK))
    refused(post("/tokenize"))


def test_the_model_is_ours(post: Post, in_process_server: InProcessServer) -> None:
    """vLLM test_tokenization.py: its requests may name the model"""
    assert ok(in_process_server.client.post("/tokenize", json={"prompt": "a"}))["count"] == 1
    refused(post("/tokenize", prompt="a", model="another"), 404)


@differs("vllm test_tokenization.py::test_tokenizer_info_basic")
def test_about_the_tokenizer(in_process_server: InProcessServer) -> None:
    """vLLM test_tokenization.py::test_tokenizer_info_*"""
    assert ok(in_process_server.client.get("/tokenizer_info"))["tokenizer_class"]
