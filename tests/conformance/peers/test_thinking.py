"""Reasoning: after SGLang's test_enable_thinking.py and test_reasoning_content.py, and vLLM's tests
of reasoning and its budgets. The models are random, so grammars constrain their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.in_process_server import start_in_process_server
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.requests import CHAT, UPPER, events, ok, refused
from tests.conformance.peers.test_model_kinds import QUERY, Served
from tests.model_kinds import model_kind

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    one = model_kind("qwen3")
    with start_in_process_server(
        one.folder(), **{"model.max_model_len": 2048}
    ) as in_process_server:
        yield Served(in_process_server, one)


def prompt(served: Served, **more: Any) -> list[int]:
    ids: list[int] = ok(served.post("/tokenize", messages=QUERY, **more))["tokens"]
    return ids


def test_thinking_is_a_variable(qwen: Served) -> None:
    """SGLang test_enable_thinking.py: with thinking disabled the prompt contains an empty reasoning
    block"""
    on = prompt(qwen, chat_template_kwargs={"enable_thinking": True})
    off = prompt(qwen, chat_template_kwargs={"enable_thinking": False})
    how = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
    assert off == qwen.tokenizer.apply_chat_template(QUERY, **how) != on == prompt(qwen)


def test_thinking_by_its_own_field(qwen: Served) -> None:
    """DashScope's and SGLang's top-level `enable_thinking` sets the template variable"""
    body = {"messages": QUERY, "max_tokens": 1, "return_token_ids": True}
    off = ok(qwen.post(CHAT, **body, enable_thinking=False))["prompt_token_ids"]
    assert off == prompt(qwen, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("stream", [False, True])
def test_no_reasoning_when_it_is_off(qwen: Served, stream: bool) -> None:
    """SGLang test_enable_thinking.py::test_chat_completion_without_reasoning"""
    body = {
        "messages": QUERY,
        "max_tokens": 8,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body |= {"structured_outputs": {"choice": ["a b c"]}, "stream": stream}
    answer = qwen.post(CHAT, **body)
    if stream:
        parts = [chunk["choices"][0]["delta"] for chunk in events(answer)]
    else:
        parts = [ok(answer)["choices"][0]["message"]]
    assert "".join(part.get("content") or "" for part in parts) == "a b c"
    assert not any(part.get("reasoning_content") for part in parts)


@pytest.mark.parametrize("value", [-2, 0.6, "x"])
def test_invalid_budgets_are_refused(post: Post, value: Any) -> None:
    """vLLM test_thinking_token_budget_validation.py"""
    error = refused(post(CHAT, messages=UPPER, thinking_token_budget=value))
    assert "thinking_token_budget" in error["message"]


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_is_held_or_refused(qwen: Served, budget: int, stream: bool) -> None:
    """vLLM test_thinking_token_budget.py: reasoning has at most this many tokens"""
    body = {"messages": QUERY, "max_tokens": 60, "thinking_token_budget": budget}
    answer = qwen.post(CHAT, **body, stream=stream)
    if answer.status_code == 400:
        assert "thinking_token_budget" in answer.json()["error"]["message"]
        return
    if stream:
        parts = [chunk["choices"][0]["delta"] for chunk in events(answer)]
    else:
        parts = [ok(answer)["choices"][0]["message"]]
    text = "".join(part.get("reasoning_content") or "" for part in parts)
    assert len(qwen.tokenizer.encode(text, add_special_tokens=False)) <= budget + 1


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_efforts(post: Post, effort: str) -> None:
    """vLLM test_reasoning_effort.py"""
    ok(post(CHAT, messages=UPPER, reasoning_effort=effort, max_tokens=4))


def test_invalid_efforts_are_refused(post: Post) -> None:
    """vLLM test_reasoning_effort.py"""
    refused(post(CHAT, messages=UPPER, reasoning_effort=3))
