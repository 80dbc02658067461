"""Detects the formats that a model's chat template uses."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
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
"""Tool formats, each with texts in its chat templates. The first entry whose texts all occur wins:
of two formats that share a marker, the one with more texts comes first."""

_REASONING_MARKERS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
"""Reasoning formats, in the form of `_TOOL_MARKERS`."""

_CLOSED_THINK = re.compile(r"<think>(?:\\n|\s)*</think>")


def detect_tools(chat_template: str) -> str | None:
    """Returns the tool format that a chat template uses, or None: a guess from its text."""
    return _first_of(_TOOL_MARKERS, chat_template)


def detect_reasoning(chat_template: str) -> str | None:
    """Returns the reasoning format that a chat template uses, or None: a guess from its text.

    If the generation prompt of a template ends with an open `<think>`, the answer begins inside
    reasoning. If the template opens reasoning only on request, and closes it otherwise, each prompt
    decides.
    """
    name = _first_of(_REASONING_MARKERS, chat_template)
    if name != "think":
        return name
    _, found, generation_prompt = chat_template.rpartition("add_generation_prompt")
    prompt = _CLOSED_THINK.sub("", generation_prompt) if found else ""
    return "think-open" if "<think>" in prompt and "</think>" not in prompt else "think"


def _first_of(table: Sequence[tuple[str, tuple[str, ...]]], chat_template: str) -> str | None:
    for name, markers in table:
        if all(marker in chat_template for marker in markers):
            return name
    return None
