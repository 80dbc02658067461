"""Requests that constrain an answer to calls, a format, or both, over tokenizers of each kind: for
any sampled tokens, the parser reads the requested parts."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.cluster.text.parsers import tool_format
from swell.cluster.text.parsers.deltas import Message
from tests.cluster.text.grammar.grammar_samples import SCHEMA, TOOLS, WITH_TOOLS, request, walk
from tests.model_kinds import MODEL_KINDS, model_kind

pytestmark = pytest.mark.slow

FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "wait"}}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
THINKING = [name for name in MODEL_KINDS if model_kind(name).reasoning in ("think", "think-open")]
CHOOSING = [name for name in WITH_TOOLS if name != "gpt_oss"]
"""Kinds in which a token makes the model call a tool. gpt_oss is not one: all its output follows a
header (test_harmony.py)."""
OPENERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
OPENERS += ("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>")
CUT_OFF: tuple[dict[str, Any], ...] = (
    {},
    {"response_format": FORM},
    {"parallel_tool_calls": False},
)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def check_calls(message: Message, *, most: int = 1000, names: tuple[str, ...] = ()) -> None:
    assert 1 <= len(message.tool_calls) <= most
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    for call in message.tool_calls:
        assert not names or call.name in names
        jsonschema.validate(
            json.loads(call.arguments), schemas[call.name] or {"type": "object", "maxProperties": 0}
        )


@pytest.mark.parametrize(
    ("choice", "most", "names"),
    [
        ("required", 1000, ()),
        (NAMED, 1, ("wait",)),
        (allowed("required", "look"), 1000, ("look",)),
    ],
)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_forced_calls(name: str, choice: Any, most: int, names: tuple[str, ...]):
    for seed in range(3):
        body = request(tools=TOOLS, tool_choice=choice, reasoning_effort="none")
        answer = walk(name, body, seed)
        for stream in (False, True):
            message = answer.read(stream=stream)
            assert answer.ended and message.content is None and message.reasoning is None
            check_calls(message, most=most, names=names)


@pytest.mark.parametrize("fields", [{"tools": STRICT}, {"parallel_tool_calls": False}])
@pytest.mark.parametrize("name", CHOOSING)
def test_calls_that_the_model_chooses(name: str, fields: dict[str, Any]):
    body = request(**{"tools": TOOLS, "reasoning_effort": "none", **fields})
    seen = set()
    for seed in range(6):
        answer = walk(name, body, seed, likes=OPENERS if seed % 2 else (), max_tokens=200)
        calls = answer.message.tool_calls
        if calls and answer.ended:
            check_calls(answer.message, most=1 if "parallel_tool_calls" in fields else 1000)
        seen.add(bool(calls))
    assert True in seen


@pytest.mark.parametrize("name", CHOOSING)
def test_only_allowed_tools_are_called(name: str):
    for seed in range(4):
        body = request(
            tools=TOOLS,
            tool_choice=allowed("auto", "wait"),
            parallel_tool_calls=False,
            reasoning_effort="none",
        )
        answer = walk(name, body, seed, likes=OPENERS)
        assert answer.ended
        check_calls(answer.message, names=("wait",))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORM},
        {"structured_outputs": {"choice": ["<think>", "</think>", "a [TOOL_CALLS]"]}},
        {"structured_outputs": {"regex": "[a-c]{2}(<tool_call>|<think>x</think>)"}},
        {"structured_outputs": {"grammar": 'start: "no" | "never <tool_call>"'}},
    ],
    ids=["schema", "choice", "regex", "grammar"],
)
@pytest.mark.parametrize("name", CHOOSING)
def test_a_form_or_calls(name: str, fields: dict[str, Any]):
    seen = set()
    for seed in range(6):
        body = request(tools=TOOLS, **fields, reasoning_effort="none", parallel_tool_calls=False)
        answer = walk(name, body, seed, likes=OPENERS if seed % 2 else ())
        message = answer.read(stream=bool(seed % 3))
        assert answer.ended and message.reasoning is None
        if message.tool_calls:
            assert message.content is None
            check_calls(message, most=1)
        else:
            check_form(message.content, fields)
        seen.add(bool(message.tool_calls))
    assert seen == {False, True}


def check_form(content: str | None, fields: dict[str, Any]) -> None:
    assert content is not None
    wanted = fields.get("structured_outputs", {})
    if "choice" in wanted:
        assert content in wanted["choice"]
    elif "regex" in wanted:
        assert re.fullmatch(wanted["regex"], content)
    elif "grammar" in wanted:
        assert content in ("no", "never <tool_call>")
    else:
        jsonschema.validate(json.loads(content), SCHEMA)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_required_calls_win_over_a_form(name: str):
    body = request(
        tools=TOOLS, tool_choice="required", response_format=FORM, reasoning_effort="none"
    )
    answer = walk(name, body)
    assert answer.ended and answer.message.content is None
    check_calls(answer.message)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_forced_calls_that_are_cut_off_show_no_markup(name: str):
    answer = walk(name, request(tools=TOOLS, tool_choice="required", thinking_token_budget=3))
    for length in range(len(answer.ids)):
        assert answer.read(length).content is None


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, fields, marks=[pytest.mark.slow_variants] if (at + turn) % 3 else [])
        for at, name in enumerate(CHOOSING)
        for turn, fields in enumerate(CUT_OFF)
    ],
    ids=str,
)
def test_chosen_calls_that_are_cut_off_show_no_markup(name: str, fields: dict[str, Any]):
    body = request(tools=STRICT, reasoning_effort="none", **fields)
    answer = walk(name, body, likes=OPENERS, max_tokens=300)
    assert answer.message.tool_calls
    start_markers = [opener.strip() for opener in tool_format(model_kind(name).tools).start_markers]
    lengths = [*range(min(len(answer.ids), 30)), *range(30, len(answer.ids), 25)]
    for length, stream in itertools.product(lengths, (False, True)):
        message = answer.read(length, stream=stream)
        assert not any(one in (message.content or "") for one in start_markers), message


# --------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_before_a_form(name: str, tools: bool):
    if tools and name not in WITH_TOOLS:
        pytest.skip("its calls are not known")
    fields = {"tools": TOOLS, "tool_choice": "required"} if tools else {"response_format": FORM}
    thought = set()
    for seed in range(4):
        # DeepSeek's template reads `thinking`, which is off by default.
        body = request(**fields, thinking_token_budget=8, chat_template_kwargs={"thinking": True})
        answer = walk(name, body, seed, likes=("<think>",) if seed % 2 else ())
        assert answer.ended
        thought.add(answer.message.reasoning is not None)
        if tools:
            assert answer.message.content is None
            check_calls(answer.message)
        else:
            check_form(answer.message.content, {})
    assert True in thought


BLANKS = ("\u0120", "\u010a", "\u0109", "\u010d")


@pytest.mark.parametrize("name", THINKING)
def test_whitespace_is_bounded(name: str):
    """The sampled answers contain whitespace wherever the grammar allows it."""
    variables = {"chat_template_kwargs": {"thinking": True}}
    for fields in ({"response_format": FORM}, {"tools": TOOLS, "tool_choice": NAMED}):
        if "tools" in fields and name not in WITH_TOOLS:
            continue
        for blank in BLANKS:
            body = request(**fields, thinking_token_budget=4, **variables)
            answer = walk(name, body, likes=(blank,), max_tokens=600)
            assert answer.ended, answer.text_of(answer.ids)[-200:]


@pytest.mark.parametrize("form", [r"\n?a", r"\s{0,2}b", r"[^x]{3}"])
@pytest.mark.parametrize("name", THINKING)
def test_a_form_after_reasoning_keeps_its_first_characters(name: str, form: str):
    """Line breaks after the reasoning marker belong to the marker, so the answer does not begin
    with one."""
    for seed in range(8):
        body = request(
            structured_outputs={"regex": form},
            thinking_token_budget=3,
            chat_template_kwargs={"thinking": True},
        )
        likes = ("<think>", "</think>", *BLANKS[1:2])
        answer = walk(name, body, seed, likes=likes)
        assert answer.ended
        assert re.fullmatch(form, answer.message.content or ""), answer.text_of(answer.ids)


@pytest.mark.parametrize("name", THINKING)
def test_a_budget_of_reasoning_holds(name: str):
    opening, close = model_kind(name).tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    for budget in (0, 1, 5):
        body = request(thinking_token_budget=budget, chat_template_kwargs={"thinking": True})
        lengths = set()
        for seed in range(4):
            answer = walk(name, body, seed, likes=(), max_tokens=40)
            begun = answer.prompt.rstrip().endswith("<think>")
            if not begun:
                answer = walk(name, body, seed, likes=("<think>",), max_tokens=40)
                assert (answer.ids[:1] == [opening]) == (budget > 0)
            if begun or budget:
                lengths.add(answer.ids.index(close) - (not begun))
            assert budget or answer.message.reasoning is None
        assert lengths <= set(range(budget + 1))
        assert budget in lengths or not budget


@pytest.mark.parametrize("name", THINKING)
def test_effort_none_disables_reasoning(name: str):
    for seed in range(3):
        body = request(response_format=FORM, reasoning_effort="none")
        answer = walk(name, body, seed, likes=("<think>",))
        assert answer.message.reasoning is None
        check_form(answer.message.content, {})


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (allowed("auto", "evil"), "names 'evil', which is not in tools"),
        (allowed("required"), "allows no tool"),
        ({"type": "allowed_tools"}, "needs tool_choice.allowed_tools"),
        ({"type": "function"}, "needs tool_choice.function"),
        ({**NAMED, **allowed("auto", "look")}, "no other field"),
    ],
)
def test_invalid_tool_choices_are_refused(choice: Any, reason: str):
    with pytest.raises(BadRequest, match=reason):
        request(tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize("budget", [-2, 2**31])
def test_invalid_reasoning_budgets_are_refused(budget: int):
    with pytest.raises(BadRequest, match="thinking_token_budget"):
        request(thinking_token_budget=budget)


@pytest.mark.parametrize("name", ["qwen3", "llama2", "deepseek_v3"])
def test_names_of_tokens_are_written_by_a_model(name: str):
    """Runs a whole engine whose model has random weights."""
    added = [str(token) for token in model_kind(name).tokenizer.added_tokens_decoder.values()]
    texts = ["".join(f"{text}," for text in added), "<think>a</think>"]
    forms = [StructuredOutputs(choice=[texts[0]]), StructuredOutputs(choice=texts)]
    params = [SamplingParams(structured_outputs=form, max_tokens=2000) for form in forms]
    with LLM(str(model_kind(name).folder()), **{"model.dtype": "float32"}) as llm:
        answers = llm.generate(["a", "a"], params)
    assert answers[0].outputs[0].text == texts[0]
    assert answers[1].outputs[0].text in texts
    assert {answer.outputs[0].finish_reason for answer in answers} == {"stop"}


def test_a_form_that_begins_with_a_line_break_is_refused_after_reasoning():
    with pytest.raises(BadRequest, match=r"begin with '.n', which is read as part"):
        walk("qwen3", request(structured_outputs={"choice": ["\nq", "\nr"]}))
