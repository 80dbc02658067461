"""Answers for every format: near-markers, broken calls, whole calls; and how to read them."""

from __future__ import annotations

import itertools
import json

from hypothesis import strategies as st

from swell.cluster.parsers import PARSERS, REASONING, make_parser
from swell.cluster.parsers.base import Parser
from swell.cluster.parsers.parts import Arguments, Content, Part, Reasoning, ToolCall, merge

Names = tuple[str | None, str | None]
"""Of a tool format and of a reasoning format."""

_TOOLS = [name for name in PARSERS if name != "harmony"]
_THOUGHTS = [name for name in REASONING if name not in ("think", "harmony")]

ALL: list[Names] = [
    *itertools.product([None, *_TOOLS], [None, "think"]),
    *itertools.product([None, "hermes"], _THOUGHTS),
    *[("mistral", "mistral"), ("harmony", None), ("harmony", "harmony")],
]
"""Each format alone, each tool format with reasoning, each reasoning with calls."""

MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3": ["<|python_tag|>", "<|python_start|>", "<|python_end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
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
"""The markers of reasoning formats."""

CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call> } é \\" 😀"}}\n</tool_call>',
        '<tool_call>{"id": [1, "]"], "arguments": "{\\"b\\": \\"\\ud83d\\ude00\\"}", "name": "g"}',
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
    """Thoughts and calls, each complete."""
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


def parser(names: Names) -> Parser:
    """With ids that tell only how many there were before."""
    count = itertools.count()
    return make_parser(*names, lambda: f"id{next(count)}")


def read(names: Names, pieces: list[str]) -> list[Part]:
    """The fewest parts of an answer that comes in `pieces`."""
    one = parser(names)
    return merge([part for piece in pieces for part in one.push(piece)] + one.flush())


def symbols(parts: list[Part]) -> list[tuple[object, ...]]:
    """Parts, character by character."""
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
