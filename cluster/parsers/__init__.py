"""Reasoning and tool calls in the text of an answer, read while it streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from swell.cluster.parsers.base import Chain, ContentParser, Parser
from swell.cluster.parsers.parts import Tool
from swell.cluster.parsers.reasoning import ThinkParser
from swell.cluster.parsers.tools import ToolParser

PARSERS = {
    "deepseek_v3": "swell.cluster.parsers.deepseek_v3:DeepSeekV3Parser",
    "deepseek_v31": "swell.cluster.parsers.deepseek_v3:DeepSeekV31Parser",
    "deepseek_v32": "swell.cluster.parsers.deepseek_v32:DeepSeekV32Parser",
    "glm": "swell.cluster.parsers.glm:GlmParser",
    "hermes": "swell.cluster.parsers.hermes:HermesParser",
    "kimi_k2": "swell.cluster.parsers.kimi_k2:KimiK2Parser",
    "llama3": "swell.cluster.parsers.llama3:Llama3Parser",
    "minimax_m2": "swell.cluster.parsers.minimax_m2:MiniMaxM2Parser",
    "mistral": "swell.cluster.parsers.mistral:MistralParser",
    "qwen3_coder": "swell.cluster.parsers.qwen3_coder:Qwen3CoderParser",
}

REASONING = {
    "think": "swell.cluster.parsers.reasoning:ThinkParser",
    "think-open": "swell.cluster.parsers.reasoning:OpenThinkParser",
}


def make_parser(
    tools: str | None,
    reasoning: str | None,
    make_id: Callable[[], str] | None = None,
    shown: Sequence[Tool] = (),
    within: Callable[[ToolParser], Parser] | None = None,
) -> Parser:
    """The parser of one answer: reasoning is read first, tool calls in its content.

    `tools` and `reasoning` are names of `PARSERS` and `REASONING`; None: that is not looked for.
    `make_id` gives the ids of calls; by default random ones in the form of the format. `shown`: the
    tools that the model was shown. `within`: makes what reads content of the parser of calls.
    ValueError for an unknown name.
    """
    inner: Parser = ContentParser()
    if tools is not None:
        calls = tool_format(tools)(make_id, shown)
        inner = calls if within is None else within(calls)
    if reasoning is None:
        return inner
    outer: Parser = _load(REASONING, "reasoning parser", reasoning)()
    return outer if tools is None else Chain(outer, inner)


def reasoning_format(name: str) -> type[ThinkParser]:
    """The class of a reasoning format. ValueError for unknown names."""
    kind: type[ThinkParser] = _load(REASONING, "reasoning parser", name)
    return kind


def tool_format(name: str) -> type[ToolParser]:
    """The class of a tool format, which also writes its grammar. ValueError for unknown names."""
    kind: type[ToolParser] = _load(PARSERS, "tool parser", name)
    return kind


def _load(table: Mapping[str, str], what: str, name: str) -> Any:
    if name not in table:
        raise ValueError(f"{what} {name!r} is unknown; known are {', '.join(sorted(table))}")
    module, _, kind = table[name].partition(":")
    return getattr(import_module(module), kind)


_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("llama3", ("<|python_tag|>",)),
)
"""A tool format and what the text of its chat templates holds. The first of which all is there
counts: where two share a marker, the one that asks for more stands first."""

_OPEN_THINK = re.compile(r"<think>(?!(?:\\n|\s)*</think>)")


def detect_tools(chat_template: str) -> str | None:
    """The tool format that a chat template speaks of, or None: a guess from its text."""
    for name, marks in _TOOL_MARKS:
        if all(mark in chat_template for mark in marks):
            return name
    return None


def detect_reasoning(chat_template: str) -> str | None:
    """The reasoning format that a chat template speaks of, or None: a guess from its text.

    A template whose generation prompt ends with an open `<think>` makes the answer begin inside.
    One that does so only on request, or not on request, is taken for one that does.
    """
    if "<think>" not in chat_template and "</think>" not in chat_template:
        return None
    _, found, generation_prompt = chat_template.rpartition("add_generation_prompt")
    return "think-open" if found and _OPEN_THINK.search(generation_prompt) else "think"
