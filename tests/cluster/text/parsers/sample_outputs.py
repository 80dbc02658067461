"""Sample answers for every format: near-markers, broken calls and whole calls, and functions to
parse them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from hypothesis import strategies as st

from swell.cluster.text.parsers import PARSERS, REASONING, make_parser
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.parsers.deltas import (
    AnswerDelta,
    Arguments,
    Content,
    Reasoning,
    Tool,
    ToolCall,
    merge,
)

Names = tuple[str | None, str | None]
"""The names of a tool format and of a reasoning format."""

_THOUGHTS = [name for name in REASONING if name != "harmony"]
_BEHIND_THOUGHTS = ("hermes", "kimi_k2", "llama3", "pythonic", "qwen3_coder")

ALL: list[Names] = [
    (None, None),
    *((name, None) for name in PARSERS),
    *((None, name) for name in _THOUGHTS),
    *((name, "think") for name in _BEHIND_THOUGHTS),
    *[("mistral", "mistral"), ("gemma4", "gemma4"), ("harmony", "harmony")],
]
"""Each format by itself, and some tool formats of each style with reasoning before the call."""

_DSML = "｜DSML｜"
_DEEPSEEK = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
]

MARKERS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": [f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", _DSML],
    "glm": [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "hermes": ["<tool_call>", "</tool_call>"],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "llama3": ["<|python_tag|>", "<|python_start|>", "<|python_end|>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function="],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
    "harmony": [
        *["<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"],
        *["<|end|>", "<|call|>", "<|return|>"],
    ],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "phi4": ["<|tool_call|>", "<|/tool_call|>"],
}

TAGS = {
    "think": ["<think>", "</think>"],
    "think-open": ["<think>", "</think>"],
    "mistral": ["[THINK]", "[/THINK]"],
    "gemma4": ["<|channel>thought\n", "<channel|>"],
    "harmony": MARKERS["harmony"],
}
"""Reasoning format -> its markers."""

SHOWN = [
    Tool(
        "f",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "string"}, "n": {"type": ["integer", "null"]}},
        },
    )
]
"""The tools of the request. There is no schema for other tools."""


def elements(
    values: dict[str, str], begin: str = "<parameter={}>\n", end: str = "\n</parameter>\n"
) -> str:
    return "".join(f"{begin.format(key)}{value}{end}" for key, value in values.items())


def _qwen(name: str, values: dict[str, str]) -> str:
    return f"<tool_call>\n<function={name}>\n{elements(values)}</function>\n</tool_call>"


def _glm(name: str, values: dict[str, str], line: str = "\n") -> str:
    body = elements(values, f"<arg_key>{{}}</arg_key>{line}<arg_value>", f"</arg_value>{line}")
    return f"<tool_call>{name}{line}{body}</tool_call>"


def _minimax(*calls: tuple[str, dict[str, str]]) -> str:
    invokes = [
        f'<invoke name="{name}">\n{elements(values, _MINIMAX, "</parameter>" + chr(10))}</invoke>\n'
        for name, values in calls
    ]
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


_MINIMAX = '<parameter name="{}">'

_VALUES = {"a": "<tool_call> } é \\ 😀\n\n", "n": "12"}

CALLS = {
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "<｜tool▁sep｜>"}<｜tool▁call▁end｜>',
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "}"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek_v32": [
        f'<{_DSML}function_calls>\n<{_DSML}invoke name="f">\n'
        f'<{_DSML}parameter name="a" string="true">x < y</{_DSML}parameter>\n'
        f'<{_DSML}parameter name="b" string="false">[1, "</"]</{_DSML}parameter>\n'
        f'</{_DSML}invoke>\n<{_DSML}invoke name="g">\n</{_DSML}invoke>\n'
        f"</{_DSML}function_calls>",
    ],
    "glm": [
        _glm("f", _VALUES),
        _glm("g", {"b": '{"c": "</arg_value>"}', "d": "text"}, ""),
        "<tool_call>g</tool_call>",
    ],
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call> } é \\" 😀"}}\n</tool_call>',
        '<tool_call>{"id": [1, "]"], "arguments": "{\\"b\\": \\"\\ud83d\\ude00\\"}", "name": "g"}',
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "<|tool_call_end|>"}<|tool_call_end|><|tool_call_begin|>g:1 '
        "<|tool_call_argument_begin|>{} <|tool_call_end|><|tool_calls_section_end|>",
        '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": [1<|tool_call_end|>',
    ],
    "llama3": [
        '{"name": "f", "parameters": {"a": "<|python_tag|>{}; \\\\"}}',
        '<|python_tag|>{"type": "function", "name": "g", "arguments": {"b": [{}, null]}}',
        '{"parameters": {}, "name": "\\u0066"}',
        'So {"name": "f", "parameters": {"a": "{"}}',
        '<|python_tag|>search.call(query="x")',
        '<function=f>{"a": 1}</function>',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}, '
        '{"arguments": {}, "name": "g"}]',
        '[TOOL_CALLS]f[ARGS]{"a": "]"}',
        '[TOOL_CALLS]g-2[CALL_ID]aB3dE6gH9[ARGS]"{\\"a\\": 1}"',
        '[TOOL_CALLS]h{"a": [1.5]}',
    ],
    "minimax_m2": [
        _minimax(("f", _VALUES), ("g", {"b": "[]"})),
        '<minimax:tool_call><invoke name="g"><parameter name="b">x</invoke></parameter></invoke>',
    ],
    "qwen3_coder": [
        _qwen("f", _VALUES),
        _qwen("g", {"b": "True", "c": '{"d": "</parameter>"}', "e": "nullx"}),
        "<function=f>\n<parameter=a>\nx\n<parameter=n>\n1.5x\n</function>\n</tool_call>",
    ],
    "pythonic": [
        "[f(a=1, b='x]\\'\\n', c={'k': [True, None]}), g()]",
        "<|python_start|>[f(a=.5, b=word)]<|python_end|>",
        '```tool_code\nf(a="""x"y""")\n```',
    ],
    "harmony": [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>It is.<|end|><|start|>assistant to=functions.g"
        "<|channel|>commentary json<|message|>{}",
    ],
    "functiongemma": [
        "<start_function_call>call:f{a:1,b:<escape>x{}<escape>}<end_function_call>",
        "<start_function_call>call:g{}<end_function_call>",
    ],
    "gemma4": [
        '<|tool_call>call:f{a:{b:[<|"|>x<|"|>,true]},<|"|>k<|"|>:word}<tool_call|>',
        "<|tool_call>call:g{}<tool_call|>",
    ],
    "phi4": [
        '<|tool_call|>[{"name": "f", "arguments": {"a": "]"}}]<|/tool_call|>',
        'functools[{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]',
    ],
}

THOUGHTS = {
    "think": ["<think>\nso it is 4.\n</think>\n\n"],
    "think-open": ["so it is 4.\n</think>\n\n"],
    "mistral": ["[THINK]so it is 4.\n[/THINK]"],
    "gemma4": ["<|channel>thought\nso it is 4.<channel|>"],
    "harmony": [
        "<|channel|>analysis<|message|>so it is 4.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 4.<|return|>"
    ],
}

_COMMON = [
    *["\n", " ", "\n\n", "x", "é", "😀", "<", "[", "{", "}", "]", '"', "\\", ";", ",", ":", "1"],
    *[
        '{"name"',
        '{"name": "f"',
        '"arguments": ',
        '"parameters": {',
        '{"a": ',
        '"\\ud83d',
        "\\u00e",
    ],
    *['{"name": "f", "arguments": {"a": 1}}', '{"name": "", "arguments": {}}', '{"x": 1}'],
]


def markers(names: Names) -> list[str]:
    tools, reasoning = names
    return (MARKERS[tools] if tools else []) + (TAGS[reasoning] if reasoning else [])


def whole(names: Names) -> list[str]:
    """Returns complete reasoning blocks and tool calls."""
    tools, reasoning = names
    return (THOUGHTS[reasoning] if reasoning else []) + (CALLS[tools] if tools else [])


def fragments(names: Names) -> list[str]:
    found = list(_COMMON)
    found += [marker[:size] for marker in markers(names) for size in (3, len(marker) - 1)]
    found += markers(names) * 3 + whole(names) * 2
    found += [one[: len(one) // 2] for one in whole(names)]
    return found


def texts(names: Names, max_pieces: int = 8) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(fragments(names)), max_size=max_pieces).map("".join)


def parser(names: Names, shown: Sequence[Tool] | None = None) -> Parser:
    """Returns a parser whose call ids are consecutive numbers."""
    count = itertools.count()
    return make_parser(*names, lambda: f"id{next(count)}", SHOWN if shown is None else shown)


def read(names: Names, pieces: list[str], shown: Sequence[Tool] | None = None) -> list[AnswerDelta]:
    """Parses an answer that arrives in `pieces` and merges adjacent parts."""
    one = parser(names, shown)
    return merge([part for piece in pieces for part in one.push(piece)] + one.flush())


def symbols(parts: list[AnswerDelta]) -> list[tuple[object, ...]]:
    """Splits parts into single characters."""
    found: list[tuple[object, ...]] = []
    for part in parts:
        match part:
            case ToolCall():
                found.append(("call", part))
            case Content(text) | Reasoning(text):
                found += [(type(part).__name__, char) for char in text]
            case Arguments(index, text):
                found += [("arguments", index, char) for char in text]
    return found


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
