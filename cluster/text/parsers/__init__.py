"""Parsers of reasoning and tool calls in the text of an answer, for streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from swell.cluster.text.parsers.base import ContentParser, Parser, ReasoningFormat
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.tool_parser import ToolParser

if TYPE_CHECKING:
    from swell.cluster.text.parsers.formats.harmony import HarmonyParser

PARSERS = {
    "deepseek_v3": "swell.cluster.text.parsers.formats.deepseek_v3:DeepSeekV3Parser",
    "deepseek_v31": "swell.cluster.text.parsers.formats.deepseek_v3:DeepSeekV31Parser",
    "deepseek_v32": "swell.cluster.text.parsers.formats.deepseek_v32:DeepSeekV32Parser",
    "glm": "swell.cluster.text.parsers.formats.glm:GlmParser",
    "hermes": "swell.cluster.text.parsers.formats.hermes:HermesParser",
    "kimi_k2": "swell.cluster.text.parsers.formats.kimi_k2:KimiK2Parser",
    "llama3": "swell.cluster.text.parsers.formats.llama3:Llama3Parser",
    "minimax_m2": "swell.cluster.text.parsers.formats.minimax_m2:MiniMaxM2Parser",
    "mistral": "swell.cluster.text.parsers.formats.mistral:MistralParser",
    "pythonic": "swell.cluster.text.parsers.formats.pythonic:PythonicParser",
    "harmony": "swell.cluster.text.parsers.formats.harmony:HarmonyParser",
    "functiongemma": "swell.cluster.text.parsers.formats.gemma:FunctionGemmaParser",
    "gemma4": "swell.cluster.text.parsers.formats.gemma:Gemma4Parser",
    "phi4": "swell.cluster.text.parsers.formats.phi4:Phi4Parser",
    "qwen3_coder": "swell.cluster.text.parsers.formats.qwen3_coder:Qwen3CoderParser",
}

REASONING = {
    "think": "swell.cluster.text.parsers.reasoning:ThinkParser",
    "think-open": "swell.cluster.text.parsers.reasoning:OpenThinkParser",
    "mistral": "swell.cluster.text.parsers.reasoning:MistralThinkParser",
    "gemma4": "swell.cluster.text.parsers.reasoning:GemmaThinkParser",
    "harmony": PARSERS["harmony"],
}
"""A format in both tables reads reasoning and calls, no matter which of the two names it."""


def make_parser(
    tools: str | None,
    reasoning: str | None,
    make_id: Callable[[], str] | None = None,
    request_tools: Sequence[Tool] = (),
    prompt: str = "",
    wrap_calls: Callable[[ToolParser], Parser] | None = None,
    constrained: bool = False,
) -> Parser:
    """Returns the parser of one answer, which reads reasoning first, then tool calls in the
    content.

    `tools` and `reasoning` are names in `PARSERS` and `REASONING`; None means that there is nothing
    to read. `make_id` creates the ids of calls; the default creates random ones in the style of the
    format. `request_tools` are those of the request. `prompt` is the end of the prompt's text,
    which may have opened reasoning. `wrap_calls` creates a parser of the content around the parser
    of calls. `constrained` means that the answer follows a grammar. Raises ValueError for an
    unknown name.
    """
    messages = message_format(tools, reasoning)
    if messages is not None:
        return messages(make_id, None if tools is None else request_tools, prompt, constrained)

    def make_inner() -> Parser:
        if tools is None:
            return ContentParser()
        calls = tool_format(tools)(make_id, request_tools)
        return calls if wrap_calls is None else wrap_calls(calls)

    if reasoning is None:
        return make_inner()
    parser: Parser = _load(REASONING, "reasoning parser", reasoning)(make_inner, prompt)
    return parser


def reasoning_format(name: str) -> type[ReasoningFormat]:
    """Returns the class of a reasoning format. Raises ValueError for an unknown name."""
    kind: type[ReasoningFormat] = _load(REASONING, "reasoning parser", name)
    return kind


def message_format(tools: str | None, reasoning: str | None) -> type[HarmonyParser] | None:
    """Returns the class of the format that reads both reasoning and calls, if one of the names is
    such a format."""
    for name in (tools, reasoning):
        if name in PARSERS and PARSERS[name] == REASONING.get(name):
            kind: type[HarmonyParser] = _load(PARSERS, "tool parser", name)
            return kind
    return None


def tool_format(name: str) -> type[ToolParser]:
    """Returns the class of a tool format, which also writes its grammar. Raises ValueError for an
    unknown name."""
    kind: type[ToolParser] = _load(PARSERS, "tool parser", name)
    return kind


def _load(table: Mapping[str, str], what: str, name: str) -> Any:
    if name not in table:
        raise ValueError(f"{what} {name!r} is unknown; available: {', '.join(sorted(table))}")
    module, _, kind = table[name].partition(":")
    return getattr(import_module(module), kind)
