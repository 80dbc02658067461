"""Answers published in model cards, vLLM's tests and the harmony guide, and their expected
parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swell.cluster.text.parsers import make_parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content, Message, Tool, collect, merge
from tests.cluster.text.parsers.sample_outputs import Names

LLAMA, PYTHONIC, PHI = ("llama3", None), ("pythonic", None), ("phi4", None)
HARMONY: Names = ("harmony", "harmony")
GEMMA, GEMMA4 = ("functiongemma", None), ("gemma4", "gemma4")
MISTRAL: Names = ("mistral", "mistral")
HERMES: Names = ("hermes", "think")

CODE = [Tool("python", parameters={"type": "object", "properties": {"source": {}}})]
SEARCH = [Tool("search")]
TYPES = (
    "register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, "
    "role=None, passed_test=True, aliases=['John', 'Johnny'])"
)
TYPED: dict[str, Any] = {
    "name": "John Doe",
    "age": 37,
    "address": {"city": "San Francisco", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}
PLAN = "**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan step by step"

Calls = list[tuple[str, Any]]

ANSWERS: list[tuple[Names, list[Tool], str, str | None, str | None, Calls]] = [
    # ---- Llama 3.1: Meta's prompt formats, vLLM's llama3_json
    (
        *(LLAMA, []),
        'Here is the result: {"name": "getOpenIncidentsTool", "parameters": {}} Would you like to?',
        *(None, "Here is the result:  Would you like to?", [("getOpenIncidentsTool", {})]),
    ),
    (
        *(LLAMA, []),
        '{"name": "searchTool", "parameters": {"query": "test1"}} ; '
        '{"name": "open", "parameters": {}} ; {"name": "searchTool", "parameters": {"query": "2"}}',
        *(None, None, [("searchTool", {"query": "test1"}), ("open", {})]),
    ),
    (
        *(LLAMA, []),
        '<|python_tag|>brave_search.call(query="current weather in Menlo Park, California")',
        *(None, None, [("brave_search", {"query": "current weather in Menlo Park, California"})]),
    ),
    (
        *(LLAMA, []),
        '<function=spotify_trending_songs>{"n": 5}</function>',
        *(None, None, [("spotify_trending_songs", {"n": 5})]),
    ),
    (
        *(LLAMA, CODE),
        "<|python_tag|>def is_prime(n):\n    return True",
        *(None, None, [("python", {"source": "def is_prime(n):\n    return True"})]),
    ),
    (
        *(LLAMA, CODE),
        '<|python_tag|>subprocess.call(["ls"])',
        *(None, None, [("python", {"source": 'subprocess.call(["ls"])'})]),
    ),
    (LLAMA, [], "<|python_tag|>print(1)", None, "<|python_tag|>print(1)", []),
    # After other text, a call counts only if the request has the tool.
    (
        *(LLAMA, SEARCH),
        'As {"name": "Bob", "parameters": {}}. {"name": "search", "parameters": {"q": "a"}}',
        *(None, 'As {"name": "Bob", "parameters": {}}. ', [("search", {"q": "a"})]),
    ),
    # ---- Llama 3.2 and 4, Gemma 3
    (PYTHONIC, [], f"[{TYPES}]", None, None, [("register_user", TYPED)]),
    (
        *(PYTHONIC, []),
        f"<|python_start|>[f(steps=[]),{TYPES}]<|python_end|>",
        *(None, None, [("f", {"steps": []}), ("register_user", TYPED)]),
    ),
    (
        *(PYTHONIC, []),
        r"[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')]",
        *(None, None, [("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})]),
    ),
    (
        PYTHONIC,
        [],
        "[do_something_cool(additional_data={})]",
        None,
        None,
        [("do_something_cool", {"additional_data": {}})],
    ),
    (PYTHONIC, [], "[1, 2] and [a link](url)", None, "[1, 2] and [a link](url)", []),
    (PYTHONIC, [], "hello world[A(A=\t)A(A=,\t", None, "hello world[A(A=\t)A(A=,\t", []),
    (
        *(PYTHONIC, []),
        'Sure.\n```tool_code\nconvert(amount=200000.0, currency="EUR")\n```',
        *(None, "Sure.\n", [("convert", {"amount": 200000.0, "currency": "EUR"})]),
    ),
    # ---- gpt-oss: the guide of harmony
    (
        *(HARMONY, []),
        "<|channel|>analysis<|message|>Simple arithmetic.<|end|>\n"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        *("Simple arithmetic.", "2 + 2 = 4.", []),
    ),
    (
        *(HARMONY, []),
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"location":"San Francisco"}<|call|>',
        *("Need to use function get_weather.", None),
        [("get_weather", {"location": "San Francisco"})],
    ),
    (
        *(HARMONY, []),
        f"<|channel|>commentary<|message|>{PLAN}<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.generate_file<|constrain|>json<|message|>{"path": "index.html"}<|call|>',
        *(None, PLAN, [("generate_file", {"path": "index.html"})]),
    ),
    (
        *(HARMONY, []),
        ' to=functions.get_time<|channel|>commentary json<|message|>{"zone": "Europe/Paris"}',
        *(None, None, [("get_time", {"zone": "Europe/Paris"})]),
    ),
    (HARMONY, SEARCH, "<|channel|>commentary to=search<|message|>{}", None, None, [("search", {})]),
    (
        *(HARMONY, []),
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        *("print(1)", None, []),
    ),
    (HARMONY, [], "Hello <b>there</b>.", None, "Hello <b>there</b>.", []),
    (HARMONY, [], "<|channel|>analysis<|message|>cut <|en", "cut <|en", None, []),
    (HARMONY, [], "<|channel|>final<|message|>a<|end|><|start|>assistant<|chan", None, "a", []),
    # ---- FunctionGemma, Gemma 4
    (
        *(GEMMA, []),
        "<start_function_call>call:get_current_weather{location:<escape>Tokyo, {JP}<escape>,"
        "unit:<escape>celsius<escape>}<end_function_call>",
        *(None, None, [("get_current_weather", {"location": "Tokyo, {JP}", "unit": "celsius"})]),
    ),
    (
        *(GEMMA4, []),
        "<|channel>thought\nI need to find files<channel|>"
        '<|tool_call>call:find-all{path:<|"|>research<|"|>,n:3.14,on:true}<tool_call|>'
        "<|tool_call>call:get_status{}<tool_call|>",
        *("I need to find files", None),
        [("find-all", {"path": "research", "n": 3.14, "on": True}), ("get_status", {})],
    ),
    (
        *(GEMMA4, []),
        'Let me.\n<|tool_call>call:f{nested:{<|"|>3<|"|>:<|"|>value<|"|>},list:[<|"|>a<|"|>],'
        "param:null}<tool_call|>",
        *(None, "Let me.\n", [("f", {"nested": {"3": "value"}, "list": ["a"], "param": None})]),
    ),
    # ---- Phi-4-mini
    (
        *(PHI, []),
        'functools[\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        *(None, None),
        [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})],
    ),
    (PHI, [], 'functools{"name": "func"}', None, 'functools{"name": "func"}', []),
    (PHI, [], "functools[] This is just text", None, "functools[] This is just text", []),
    (
        *(PHI, []),
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
        *(None, None, [("f", {"a": 1})]),
    ),
    # ---- Magistral
    (
        *(MISTRAL, []),
        '\n[THINK]This\nThat[/THINK]\nSo:[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]f[ARGS]{}',
        *("This\nThat", "\nSo:", [("add", {"a": 3.5}), ("f", {})]),
    ),
    # ---- a call inside reasoning that is not closed
    (
        *(HERMES, []),
        '<think>I need to read the file.\n\n<tool_call>\n{"name": "bash", "arguments": '
        '{"command": "cat </think> /etc/hosts"}}\n</tool_call>',
        *("I need to read the file.", None, [("bash", {"command": "cat </think> /etc/hosts"})]),
    ),
    (
        *(HERMES, []),
        "<think>I may write <tool_call>\n</think>\n\nNo.",
        *("I may write <tool_call>", "No.", []),
    ),
    (
        *(("llama3", "think"), []),
        '<think>Say {"name": "f", "parameters": {}}?\n</think>\n{"name": "f", "parameters": {}}',
        *('Say {"name": "f", "parameters": {}}?', None, [("f", {})]),
    ),
    (
        *(("mistral", "mistral"), []),
        '[THINK]Add.[TOOL_CALLS]add[ARGS]{"a": 1}',
        *("Add.", None, [("add", {"a": 1})]),
    ),
]


def read(names: Names, tools: list[Tool], pieces: list[str], prompt: str = "") -> list[AnswerDelta]:
    one = make_parser(*names, lambda: "id", tools, prompt)
    return merge([part for piece in pieces for part in one.push(piece)] + one.flush())


@pytest.mark.parametrize(("names", "tools", "text", "reasoning", "content", "calls"), ANSWERS)
def test_published_answers_are_parsed(
    names: Names,
    tools: list[Tool],
    text: str,
    reasoning: str | None,
    content: str | None,
    calls: Calls,
) -> None:
    parts = read(names, tools, [text])
    message = collect(parts)
    assert (message.reasoning, message.content) == (reasoning, content)
    found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert found[: len(calls)] == calls and bool(found) == bool(calls)
    for cut in range(len(text) + 1):
        assert read(names, tools, [text[:cut], text[cut:]]) == parts
    assert read(names, tools, list(text)) == parts


PROMPTS: list[tuple[Names, str, str, Message]] = [
    ((None, "think"), "<|im_start|>assistant\n<think>\n", "a</think>b", Message("b", "a", [])),
    (
        (None, "think"),
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "a",
        Message("a", None, []),
    ),
    ((None, "think"), "<|im_start|>assistant\n", "a</think>b", Message("a</think>b", None, [])),
    ((None, "think-open"), "<｜Assistant｜></think>", "a", Message("a", None, [])),
    ((None, "think-open"), "<｜Assistant｜>", "a</think>b", Message("b", "a", [])),
    ((None, "think-open"), "<｜Assistant｜><think>\n", "<think>a</think>b", Message("b", "a", [])),
    ((None, "mistral"), "[/INST][THINK]", "a[/THINK]b", Message("b", "a", [])),
    ((None, "gemma4"), "<|turn>model\n<|channel>thought\n", "a<channel|>b", Message("b", "a", [])),
    ((None, "gemma4"), "<|channel>thought\n<channel|>", "b", Message("b", None, [])),
    (HARMONY, "<|start|>assistant", "<|channel|>analysis<|message|>a", Message(None, "a", [])),
    (HARMONY, "<|start|>assistant", "a", Message("a", None, [])),
    (HARMONY, "<|start|>assistant<|channel|>final<|message|>", "a", Message("a", None, [])),
    (HARMONY, "<|start|>assistant<|channel|>analysis<|message|>b", "a", Message(None, "a", [])),
    (HARMONY, "<|start|>user<|message|>q<|end|>", "a", Message("a", None, [])),
]


@pytest.mark.parametrize(("names", "prompt", "text", "message"), PROMPTS)
def test_an_answer_begins_where_the_prompt_ends(
    names: Names, prompt: str, text: str, message: Message
) -> None:
    for pieces in ([text], list(text)):
        assert collect(read(names, [], pieces, prompt)) == message


def test_a_call_of_a_reasoning_format_without_tools_is_content() -> None:
    parts = read((None, "harmony"), [], ["<|channel|>commentary to=functions.f<|message|>{}"])
    assert parts == [Content("{}")]
