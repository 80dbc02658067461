"""Answers of gpt-oss under a request's grammar: each message is in its channel, for any content of
the request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cluster.text.grammar.grammar_samples import (
    SCHEMA,
    TOOLS,
    GrammarSample,
    format_of,
    request,
    walk,
)
from tests.cluster.text.grammar.test_answer_grammars import (
    FORM,
    NAMED,
    STRICT,
    allowed,
    check_calls,
)
from tests.conformance.in_process_server import start_in_process_server
from tests.model_kinds import model_kind
from tests.support.deadlines import HANG_S

NAME = "gpt_oss"
MARKS = {
    "choice": ["<|end|>", "<|return|>a", "a<|channel|>final<|message|>", "<|start|>"],
}


def walks(seeds: int = 6, **fields: Any) -> list[tuple[str, GrammarSample]]:
    """Returns random walks that end, as most seeds do: two of three prefer the tokens that end a
    message."""
    body, found = request(thinking_token_budget=8, **fields), []
    for seed in range(seeds):
        likes = ((), ("<|end|>",), ("<|end|>", "<|message|>"))[seed % 3]
        answer = walk(NAME, body, seed, likes=likes, max_tokens=300)
        found += [(model_kind(NAME).tokenizer.decode(answer.ids), answer)] if answer.ended else []
    assert len(found) >= seeds // 2
    return found


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"response_format": FORM}, None),
        ({"structured_outputs": MARKS}, MARKS["choice"]),
        ({"structured_outputs": {"regex": r"<\|end\|>[ab]"}}, ["<|end|>a", "<|end|>b"]),
        ({"structured_outputs": {"grammar": 'start: "<|call|>" | "no"'}}, ["<|call|>", "no"]),
    ],
)
def test_a_form_is_the_final_message(fields: dict[str, Any], content: list[str] | None) -> None:
    reasoned = set()
    for text, answer in walks(**fields):
        assert "<|channel|>final<|message|>" in text
        for stream in (False, True):
            message = answer.read(stream=stream)
            if content is None:
                jsonschema.validate(json.loads(message.content or ""), SCHEMA)
            else:
                assert message.content in content
            assert not message.tool_calls
        reasoned.add(text.startswith("<|channel|>analysis<|message|>"))
        assert bool(message.reasoning) <= text.startswith("<|channel|>analysis<|message|>")
    assert reasoned == {False, True}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_reasoning_may_precede_requested_calls(choice: Any) -> None:
    reasoned = set()
    for text, answer in walks(tools=TOOLS, tool_choice=choice):
        message = answer.message
        assert message.content is None
        check_calls(message, most=1, names=("wait",) if choice == NAMED else ())
        reasoned.add(text.startswith("<|channel|>analysis<|message|>"))
    assert reasoned == {False, True}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": STRICT}, ()),
        ({"parallel_tool_calls": False}, ()),
        ({"tool_choice": allowed("auto", "wait")}, ("wait",)),
    ],
)
def test_the_model_chooses_between_text_and_a_call(
    fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    seen = set()
    for text, answer in walks(seeds=16, **{"tools": TOOLS, **fields}):
        message = answer.message
        assert text.startswith("<|channel|>")
        if message.tool_calls:
            check_calls(message, most=1, names=names)
            assert message.content is None or "<|channel|>commentary<|message|>" in text
        else:
            assert "<|channel|>final<|message|>" in text
        seen.add((bool(message.reasoning), bool(message.content), bool(message.tool_calls)))
    assert {called for _, _, called in seen} == {False, True}
    assert {spoke for _, spoke, called in seen if called} == {False, True}
    assert {thought for thought, _, _ in seen} == {False, True}


def test_a_form_or_a_call() -> None:
    seen = set()
    for _, answer in walks(seeds=10, tools=TOOLS, response_format=FORM):
        message = answer.read(stream=True)
        if message.tool_calls:
            assert message.content is None
            check_calls(message, most=1)
        else:
            jsonschema.validate(json.loads(message.content or ""), SCHEMA)
        seen.add(bool(message.tool_calls))
    assert seen == {False, True}


@pytest.mark.parametrize("fields", [{}, {"response_format": FORM}, {"tools": STRICT}])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_covers_all_reasoning(budget: int, fields: dict[str, Any]) -> None:
    """There is only one reasoning message."""
    encode = model_kind(NAME).tokenizer.encode
    opening = encode("<|channel|>analysis<|message|>", add_special_tokens=False)
    (end,) = encode("<|end|>", add_special_tokens=False)
    for seed in range(4):
        body = request(thinking_token_budget=budget, **fields)
        answer = walk(NAME, body, seed, likes=("<|channel|>", "<|end|>") if seed % 2 else ())
        size = len(opening)
        found = [at for at in range(len(answer.ids)) if answer.ids[at : at + size] == opening]
        assert found in ([], [0]) and not (found and not budget)
        if found:
            assert answer.ids.index(end) - size <= budget
        assert answer.message.reasoning is None or found


def test_the_message_that_the_prompt_has_begun_is_continued() -> None:
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "It is"},
    ]
    body = request(
        messages=messages,
        add_generation_prompt=False,
        continue_final_message=True,
        structured_outputs={"choice": [" so", " not"]},
    )
    answer = walk(NAME, body)
    assert answer.prompt.endswith("<|message|>It is")
    assert answer.ended and answer.message.content in (" so", " not")


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_there_are_no_calls(fields: dict[str, Any]) -> None:
    answer = format_of(NAME, request(**fields), "<|start|>assistant")
    assert answer.grammar is None
    parser = answer.make_parser()
    parts = parser.push("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}")
    parts += parser.flush()
    assert [(type(part).__name__, part.text) for part in parts] == [("Content", "{}")]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_model_writes_harmony_messages() -> None:
    """Runs a whole engine whose model has random weights."""
    base = {
        "model": "gpt",
        "messages": [{"role": "user", "content": "How is it?"}],
        "max_tokens": 400,
        "thinking_token_budget": 5,
        "seed": 1,
    }
    cases = [
        {"tools": STRICT, "tool_choice": "required"},
        {"tools": STRICT, "tool_choice": NAMED},
        {"response_format": FORM},
        {"tools": STRICT, "response_format": FORM},
    ]
    with start_in_process_server(
        model_kind(NAME).folder(), **{"model.name": "gpt", "model.max_model_len": 2048}
    ) as house:
        for fields in cases:
            answer = httpx.post(
                f"{house.url}/v1/chat/completions", json={**base, **fields}, timeout=HANG_S
            ).json()
            assert "choices" in answer, answer
            (choice,) = answer["choices"]
            message = choice["message"]
            calls, content = message.get("tool_calls"), message["content"]
            if calls:
                named = fields.get("tool_choice") == NAMED
                assert choice["finish_reason"] == ("stop" if named else "tool_calls")
                assert content is None
                assert "tools" in fields
                json.loads(calls[0]["function"]["arguments"])
            else:
                assert choice["finish_reason"] == "stop" and "tool_choice" not in fields
                jsonschema.validate(json.loads(content), SCHEMA)
