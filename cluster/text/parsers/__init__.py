"""Reasoning and tool calls in the text of an answer, read while it streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from swell.cluster.text.parsers.base import ContentParser, Parser, ReasoningFormat
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.tools import ToolParser

if TYPE_CHECKING:
    from swell.cluster.text.parsers.harmony import HarmonyParser

PARSERS = {
    "deepseek_v3": "swell.cluster.text.parsers.deepseek_v3:DeepSeekV3Parser",
    "deepseek_v31": "swell.cluster.text.parsers.deepseek_v3:DeepSeekV31Parser",
    "deepseek_v32": "swell.cluster.text.parsers.deepseek_v32:DeepSeekV32Parser",
    "glm": "swell.cluster.text.parsers.glm:GlmParser",
    "hermes": "swell.cluster.text.parsers.hermes:HermesParser",
    "kimi_k2": "swell.cluster.text.parsers.kimi_k2:KimiK2Parser",
    "llama3": "swell.cluster.text.parsers.llama3:Llama3Parser",
    "minimax_m2": "swell.cluster.text.parsers.minimax_m2:MiniMaxM2Parser",
    "mistral": "swell.cluster.text.parsers.mistral:MistralParser",
    "pythonic": "swell.cluster.text.parsers.pythonic:PythonicParser",
    "harmony": "swell.cluster.text.parsers.harmony:HarmonyParser",
    "functiongemma": "swell.cluster.text.parsers.gemma:FunctionGemmaParser",
    "gemma4": "swell.cluster.text.parsers.gemma:Gemma4Parser",
    "phi4": "swell.cluster.text.parsers.phi4:Phi4Parser",
    "qwen3_coder": "swell.cluster.text.parsers.qwen3_coder:Qwen3CoderParser",
}

REASONING = {
    "think": "swell.cluster.text.parsers.reasoning:ThinkParser",
    "think-open": "swell.cluster.text.parsers.reasoning:OpenThinkParser",
    "mistral": "swell.cluster.text.parsers.reasoning:MistralThinkParser",
    "gemma4": "swell.cluster.text.parsers.reasoning:GemmaThinkParser",
    "harmony": PARSERS["harmony"],
}
"""A format that is in both tables reads reasoning and calls, whichever of them is looked for."""


def make_parser(
    tools: str | None,
    reasoning: str | None,
    make_id: Callable[[], str] | None = None,
    shown: Sequence[Tool] = (),
    prompt: str = "",
    within: Callable[[ToolParser], Parser] | None = None,
    held: bool = False,
) -> Parser:
    """The parser of one answer: reasoning is read first, tool calls in its content.

    `tools` and `reasoning` are names of `PARSERS` and `REASONING`; None: that is not looked for.
    `make_id` gives the ids of calls; by default random ones in the form of the format. `shown`: the
    tools that the model was shown. `prompt`: the end of the prompt's text, which may have opened
    reasoning. `within`: makes what reads content of the parser of calls. `held`: a grammar holds
    the answer. ValueError for an unknown name.
    """
    messages = message_format(tools, reasoning)
    if messages is not None:
        return messages(make_id, None if tools is None else shown, prompt, held)

    def make_inner() -> Parser:
        if tools is None:
            return ContentParser()
        calls = tool_format(tools)(make_id, shown)
        return calls if within is None else within(calls)

    if reasoning is None:
        return make_inner()
    parser: Parser = _load(REASONING, "reasoning parser", reasoning)(make_inner, prompt)
    return parser


def reasoning_format(name: str) -> type[ReasoningFormat]:
    """The class of a reasoning format. ValueError for unknown names."""
    kind: type[ReasoningFormat] = _load(REASONING, "reasoning parser", name)
    return kind


def message_format(tools: str | None, reasoning: str | None) -> type[HarmonyParser] | None:
    """The class of a format that reads reasoning and calls, if one of the names is that of one."""
    for name in (tools, reasoning):
        if name in PARSERS and PARSERS[name] == REASONING.get(name):
            kind: type[HarmonyParser] = _load(PARSERS, "tool parser", name)
            return kind
    return None


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
    ("harmony", ("<|channel|>", "to=functions.")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("phi4", ("<|tool_call|>",)),
    ("phi4", ("functools[",)),
    ("pythonic", ("[func_name1(",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("llama3", ("<|header_start|>", '"parameters"')),
    ("llama3", ("<|python_tag|>",)),
    ("pythonic", ("<|python_start|>",)),
)
"""A tool format and what the text of its chat templates holds. The first of which all is there
counts: where two share a marker, the one that asks for more stands first."""

_REASONING_MARKS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
"""As `_TOOL_MARKS`."""

_CLOSED_THINK = re.compile(r"<think>(?:\\n|\s)*</think>")


def detect_tools(chat_template: str) -> str | None:
    """The tool format that a chat template speaks of, or None: a guess from its text."""
    return _first_of(_TOOL_MARKS, chat_template)


def detect_reasoning(chat_template: str) -> str | None:
    """The reasoning format that a chat template speaks of, or None: a guess from its text.

    A template whose generation prompt ends with an open `<think>` makes the answer begin inside.
    One that opens it on request, and closes it otherwise, leaves that to each prompt.
    """
    name = _first_of(_REASONING_MARKS, chat_template)
    if name != "think":
        return name
    _, found, generation_prompt = chat_template.rpartition("add_generation_prompt")
    open_ones = _CLOSED_THINK.sub("", generation_prompt) if found else ""
    return "think-open" if "<think>" in open_ones and "</think>" not in open_ones else "think"


def _first_of(
    table: Sequence[tuple[str | None, tuple[str, ...]]], chat_template: str
) -> str | None:
    for name, marks in table:
        if all(mark in chat_template for mark in marks):
            return name
    return None
