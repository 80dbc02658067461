"""Calls in sections and in XML-like elements: examples published by the models' makers and in
vLLM's and SGLang's tests, the types that schemas give to values, and calls that the models'
templates render."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.parsers import make_parser
from swell.cluster.text.parsers.deltas import Tool, collect
from swell.cluster.text.parsers.detection import detect_tools
from tests.cluster.text.parsers.sample_outputs import dumped, elements, read
from tests.model_kinds import model_kind

STRINGS = {
    key: {"type": "string"} for key in ("city", "state", "unit", "date", "shape", "location")
}
TYPES = {
    **STRINGS,
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "dimensions": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "or_null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "int_or_null": {"type": ["integer", "null"]},
    "object_or_null": {"oneOf": [{"$ref": "#/$defs/Thing"}, {"type": "null"}]},
    "choice": {"enum": ["a", "1"]},
    "const": {"const": 3},
    "sloppy": {"type": "float"},
}
TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": TYPES,
            "$defs": {"Thing": {"allOf": [{"type": "object"}]}},
        },
    )
]


def qwen(values: dict[str, str], name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n{elements(values)}</function>\n</tool_call>"


def glm(values: dict[str, str], name: str = "get_weather", line: str = "\n") -> str:
    body = elements(values, f"<arg_key>{{}}</arg_key>{line}<arg_value>", f"</arg_value>{line}")
    return f"<tool_call>{name}{line}{body}</tool_call>"


def minimax(*calls: dict[str, str], line: str = "") -> str:
    begin, end = '<parameter name="{}">', f"</parameter>{line}"
    invokes = [
        f'<invoke name="get_weather">{line}{elements(one, begin, end)}</invoke>{line}'
        for one in calls
    ]
    return f"<minimax:tool_call>{line}{''.join(invokes)}</minimax:tool_call>"


def dsml(*calls: dict[str, tuple[bool, str]]) -> str:
    lines = ["<｜DSML｜function_calls>"]
    for values in calls:
        lines.append('<｜DSML｜invoke name="get_weather">')
        for key, (is_string, value) in values.items():
            head = f'<｜DSML｜parameter name="{key}" string="{dumped(is_string)}">'
            lines.append(f"{head}{value}</｜DSML｜parameter>")
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜function_calls>"])


def kimi(*calls: tuple[str, str]) -> str:
    begin, arguments, end = (
        f"<|tool_call{part}|>" for part in ("_begin", "_argument_begin", "_end")
    )
    texts = [f"{begin}{name} {arguments}{text}{end}" for name, text in calls]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def deepseek(*calls: str) -> str:
    texts = [f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def v3(name: str, text: str) -> str:
    return f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"


DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}

PUBLISHED: list[tuple[str, str, str | None, list[dict[str, Any]]]] = [
    ("qwen3_coder", "No call.", "No call.", []),
    ("qwen3_coder", qwen(DALLAS), None, [DALLAS]),
    ("qwen3_coder", "Sure! Let me check.\n\n" + qwen(DALLAS), "Sure! Let me check.", [DALLAS]),
    ("qwen3_coder", f"{qwen(DALLAS)}\n{qwen(ORLANDO)}", None, [DALLAS, ORLANDO]),
    (
        "qwen3_coder",
        qwen({"shape": "rectangle", "dimensions": '{"width": 10, \n "height": 20}', "count": "2"}),
        None,
        [{"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "count": 2}],
    ),
    # Without <tool_call>, which the model omits sometimes, and without the first </parameter>.
    ("qwen3_coder", "Ok.\n\n" + qwen(DALLAS).removeprefix("<tool_call>\n"), "Ok.", [DALLAS]),
    ("qwen3_coder", qwen(DALLAS).replace("</parameter>\n", "", 1), None, [DALLAS]),
    ("qwen3_coder", "<function=unknown>\n</function>", "<function=unknown>\n</function>", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=bad\n</function>\n</tool_call>",
        "<tool_call>\n<function=bad\n</function>\n</tool_call>",
        [],
    ),
    # On one line, as in PR #36032 of vLLM.
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=object_or_null>{"key": "value", "n": 42}'
        "</parameter>\n</function>\n</tool_call>",
        None,
        [{"object_or_null": {"key": "value", "n": 42}}],
    ),
    ("glm", glm(DALLAS).replace("\n", "\n    "), None, [DALLAS]),
    ("glm", f"Checking. {glm(DALLAS)}\n    {glm(ORLANDO)}", "Checking. ", [DALLAS, ORLANDO]),
    ("glm", "Checking.\n" + glm(DALLAS, line=""), "Checking.", [DALLAS]),
    ("glm", glm(DALLAS, line="") + glm(ORLANDO, line=""), None, [DALLAS, ORLANDO]),
    ("glm", "  \n  <tool_call>get_weather</tool_call>", None, [{}]),
    ("glm", "<tool_call>get_weather\n</tool_call>", None, [{}]),
    (
        "minimax_m2",
        minimax({"city": "Seattle", "count": "5"}),
        None,
        [{"city": "Seattle", "count": 5}],
    ),
    ("minimax_m2", "Ok.\n" + minimax(DALLAS, ORLANDO, line="\n"), "Ok.", [DALLAS, ORLANDO]),
    (
        "minimax_m2",
        minimax({"or_null": "null"}, {"or_null": "Alice"}),
        None,
        [{"or_null": None}, {"or_null": "Alice"}],
    ),
    (
        "deepseek_v32",
        "Ok.\n\n" + dsml({}, {"location": (True, "SF")}),
        "Ok.",
        [{}, {"location": "SF"}],
    ),
    (
        "deepseek_v32",
        dsml(
            {
                "flag": (False, "true"),
                "count": (True, "42"),
                "city": (False, "null"),
                "or_null": (True, "null"),
                "int_or_null": (False, "null"),
                "ratio": (False, "abc"),
                "other": (True, "42"),
                "another": (False, "[1]"),
            }
        ),
        None,
        [
            {"flag": True, "count": 42, "city": "null", "or_null": "null", "int_or_null": None}
            | {"ratio": "abc", "other": "42", "another": [1]}
        ],
    ),
    (
        "kimi_k2",
        "Help. " + kimi(("functions.get_weather:0", '{"city": "A"}'), ("get_weather:1", "{\n}")),
        "Help. ",
        [{"city": "A"}, {}],
    ),
    (
        "kimi_k2",
        kimi(("0", '{"html": "<div>content</div>"}')),
        None,
        [{"html": "<div>content</div>"}],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|> noise " + kimi(("f:0", "{}"))[28:],
        "<|tool_calls_section_begin|> noise ",
        [{}],
    ),
    (
        "deepseek_v3",
        "Ok." + deepseek(v3("get_weather", dumped(DALLAS)), v3("g", "{}")),
        "Ok.",
        [DALLAS, {}],
    ),
    (
        "deepseek_v31",
        deepseek('foo<｜tool▁sep｜>{"x":1}', 'bar<｜tool▁sep｜>{"y":2}'),
        None,
        [{"x": 1}, {"y": 2}],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
        [],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments"), PUBLISHED)
def test_published_examples_are_parsed(
    name: str, text: str, content: str | None, arguments: list[dict[str, Any]]
) -> None:
    whole = collect(read((name, None), [text], TOOLS))
    assert whole.content == content
    assert [json.loads(call.arguments) for call in whole.tool_calls] == arguments
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), 4))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert collect(read((name, None), pieces, TOOLS)) == whole
    assert collect(read((name, None), [*text], TOOLS)) == whole


CUT: list[tuple[str, str, str | None, list[str]]] = [
    ("qwen3_coder", "a<tool_call>\n<function=f", "a<tool_call>\n<function=f", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=ci", None, ["{"]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n[1,\n</para", None, ['{"x": [1,']),
    ("qwen3_coder", qwen({"city": "A"})[:-3], None, ['{"city": "A"}']),
    ("qwen3_coder", qwen({"city": "A"}) + "\nDone.", "\nDone.", ['{"city": "A"}']),
    # Text that cannot belong to a call ends it, even if the call is incomplete.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<oops", "<oops", ["{"]),
    ("qwen3_coder", "<tool_call>\n<tool_call>\n<function=f></function>", "<tool_call>\n", ["{}"]),
    ("glm", "<tool_call>f\n<arg_key>k</arg_key>\noops", "<arg_key>k</arg_key>oops", ["{"]),
    ("glm", "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>va", None, ['{"k": "va']),
    ("glm", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("kimi_k2", kimi(("functions.x.0", "{}")), kimi(("functions.x.0", "{}")), []),
    ("kimi_k2", kimi(("f:0", '{"a": [1'), ("g:1", "{}")), None, ['{"a": [1', "{}"]),
    ("deepseek_v3", deepseek(v3("f", '{"city": "Tokyo"')), None, ['{"city": "Tokyo"\n']),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments"), CUT)
def test_cut_off_and_invalid_calls_are_parsed(
    name: str, text: str, content: str | None, arguments: list[str]
) -> None:
    for pieces in ([text], [*text]):
        message = collect(read((name, None), pieces, TOOLS))
        assert message.content == content
        assert [call.arguments for call in message.tool_calls] == arguments


# ----------------------------------------------------------------------- rendered by templates

_TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc"]) | st.just("\n"), max_size=12)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=6,
)
_VALUES = {
    "city": _TEXT | st.sampled_from(["</para", "<tool_call>", "12", "null", "\n\n", '"x"']),
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "dimensions": st.dictionaries(_TEXT | st.just("</arg_value>"), _JSON, max_size=3),
    "tags": st.lists(_TEXT | st.just("</parameter>"), max_size=3),
    "or_null": st.none() | st.sampled_from(["", "x", "nul"]),
}
_ARGUMENTS = st.fixed_dictionaries({}, optional=_VALUES)
_BEGINS = {
    "qwen3_coder": "<|im_start|>assistant",
    "glm4": "<|assistant|>\n<think></think>",
    "kimi_k2": "<|im_assistant|>assistant<|im_middle|>",
    "deepseek_r1": "<｜Assistant｜>",
    "deepseek_v3": "<｜Assistant｜></think>",
}
"""The text before an answer in a history."""
_ENDS = ("<|im_end|>\n", "<|im_end|>", "<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("name", _BEGINS)
def test_a_template_of_a_kind_is_known(name: str) -> None:
    assert detect_tools(model_kind(name).template) == model_kind(name).tools


@pytest.mark.parametrize("name", _BEGINS)
@settings(max_examples=40, deadline=None)
@given(st.lists(_ARGUMENTS, min_size=1, max_size=3), st.sampled_from(["", "Let me see."]))
def test_calls_that_a_template_renders_are_parsed(
    name: str, arguments: list[dict[str, Any]], content: str
) -> None:
    """An answer that is written like a call in the history is parsed."""
    ids = [f"functions.get_weather:{index}" for index in range(len(arguments))]
    calls = [
        {"id": one, "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for one, given in zip(ids, arguments, strict=True)
    ]
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    user = {"role": "user", "content": "hi"}
    tokenizer = model_kind(name).tokenizer
    text = tokenizer.apply_chat_template([user, said], tokenize=False)
    before = tokenizer.apply_chat_template([user], tokenize=False)
    assert text.startswith(before + _BEGINS[name])
    answer = text[len(before + _BEGINS[name]) :]
    for end in _ENDS:
        answer = answer.removesuffix(end)
    reader = make_parser(model_kind(name).tools, None, iter(ids).__next__, TOOLS)
    message = collect([*reader.push(answer), *reader.flush()])
    assert (message.content or "").strip() == content
    assert [call.id for call in message.tool_calls] == ids
    assert [json.loads(call.arguments) for call in message.tool_calls] == arguments
