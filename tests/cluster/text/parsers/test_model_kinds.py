"""Chat templates of each kind: the formats that are detected from them. What the templates write
can be parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swell.cluster.text.parsers import make_parser
from swell.cluster.text.parsers.deltas import Message, Tool, collect
from swell.cluster.text.parsers.detection import detect_reasoning, detect_tools
from tests.model_kinds import MODEL_KINDS, model_kind

QUESTION = {"role": "user", "content": "How is the sky?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "n": {"type": "integer"},
        "deep": {"type": "object"},
        "list": {"type": "array", "items": {"type": "boolean"}},
    },
}
SHOWN = [Tool(name, parameters=SCHEMA) for name in ("look", "listen_to")]
ARGUMENTS: list[dict[str, Any]] = [
    {"at": 'the "sky", \\ é 😀\n{}'},
    {"n": -3, "deep": {"a": ["x", None], "b": 1.5}, "list": [True, False]},
]


def calls(names: list[str], arguments: list[dict[str, Any]]) -> dict[str, Any]:
    made = [
        {
            "id": f"aB3dE6gH{index}",
            "type": "function",
            "function": {"name": name, "arguments": one},
        }
        for index, (name, one) in enumerate(zip(names, arguments, strict=True))
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def rendered(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Renders without tools, which some templates show only with the last question."""
    variables = {"add_generation_prompt": False, **variables}
    text: str = model_kind(name).tokenizer.apply_chat_template(
        messages, tokenize=False, **variables
    )
    return text


def turn(name: str, message: dict[str, Any]) -> tuple[str, str]:
    """Returns the prompt before an answer, and the answer as the template writes it in a
    history."""
    prompt = rendered(name, [QUESTION], add_generation_prompt=True)
    whole = rendered(name, [QUESTION, message])
    common = next(
        (at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    return prompt[:common], whole[common:]


def read(name: str, prompt: str, answer: str) -> Message:
    one = model_kind(name)
    for end in sorted(map(one.tokenizer.decode, one.end_ids), key=len):
        answer = answer.strip("\n").removesuffix(end)
    parser = make_parser(one.tools, one.reasoning, request_tools=SHOWN, prompt=prompt)
    return collect([*parser.push(answer), *parser.flush()])


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_the_formats_of_a_kind_are_guessed(name: str) -> None:
    one = model_kind(name)
    assert detect_tools(one.template) == one.tools
    assert detect_reasoning(one.template) == one.reasoning


def test_most_kinds_have_tools() -> None:
    assert sum(model_kind(name).tools is not None for name in MODEL_KINDS) >= 12


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", [name for name in MODEL_KINDS if model_kind(name).tools])
def test_a_call_in_the_history_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    message = calls(["look"], [arguments])
    if name == "kimi_k2":
        message["tool_calls"][0]["id"] = "functions.look:0"
    found = read(name, *turn(name, message))
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [
        ("look", arguments)
    ]
    assert not (found.content or "").strip()


_SINGLE = ("llama3", "gpt_oss")
"""Kinds whose templates write one call per message."""


@pytest.mark.parametrize(
    "name", [n for n in MODEL_KINDS if model_kind(n).tools and n not in _SINGLE]
)
def test_two_calls_in_the_history_are_read_back(name: str) -> None:
    message = calls(["look", "listen_to"], ARGUMENTS)
    if name == "kimi_k2":
        for index, call in enumerate(message["tool_calls"]):
            call["id"] = f"functions.{call['function']['name']}:{index}"
    found = read(name, *turn(name, message))
    assert [json.loads(call.arguments) for call in found.tool_calls] == ARGUMENTS
    assert [call.name for call in found.tool_calls] == ["look", "listen_to"]


PROMPTS = [
    ("qwen3", {}, "<think>\na\n</think>\n\nb", Message("b", "a", [])),
    ("qwen3", {"enable_thinking": False}, "b", Message("b", None, [])),
    ("deepseek_r1", {}, "a\n</think>\n\nb", Message("b", "a", [])),
    ("deepseek_v3", {}, "b", Message("b", None, [])),
    ("deepseek_v3", {"thinking": True}, "a</think>b", Message("b", "a", [])),
    ("glm4", {}, "\n<think>a</think>\nb", Message("b", "a", [])),
    ("glm4", {"enable_thinking": False}, "\nb", Message("\nb", None, [])),
    ("mistral_v13", {}, "[THINK]a[/THINK]b", Message("b", "a", [])),
    (
        *("gpt_oss", {}),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        Message("b", "a", []),
    ),
]


@pytest.mark.parametrize(("name", "variables", "answer", "message"), PROMPTS)
def test_reasoning_begins_as_the_template_and_its_variables_define(
    name: str, variables: dict[str, Any], answer: str, message: Message
) -> None:
    """Even if the format begins inside reasoning, the prompt may have closed it already."""
    prompt = rendered(name, [QUESTION], add_generation_prompt=True, **variables)
    parser = make_parser(None, model_kind(name).reasoning, prompt=prompt)
    assert collect([*parser.push(answer), *parser.flush()]) == message
