r"""Calls as Kimi K2 writes them.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
    <|tool_call_end|><|tool_calls_section_end|>

`functions.f:0` is the call's id: the templates want it back. Of a model that writes the name alone,
or the number alone where there is one tool, that is the id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, Call
from swell.cluster.text.parsers.delimited import DelimitedArguments
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.sections import SectionParser

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

_ID = re.compile(rf"[^\s<>]{{0,{MAX_NAME_CHARS + 1}}}")
_NUMBERED = re.compile(r"(?:functions\.)?(.+):[0-9]+")


class KimiCall(DelimitedArguments):
    ends = (CALL_END,)
    fence = "<"

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self._tools = tools
        self._read_run(_ID, self._end_id)

    def _end_id(self, text: str) -> None:
        self.id, self.name = text, self._name(text)
        if self.name:
            self._expect({ARGUMENTS: self._begin_arguments})
        else:
            self._break("")

    def _name(self, text: str) -> str:
        if numbered := _NUMBERED.fullmatch(text):
            return numbered[1]
        if text.isdecimal() and len(self._tools) == 1:
            return next(iter(self._tools))
        name = text.removeprefix("functions.")
        return name if name in self._tools else ""


class KimiK2Parser(SectionParser):
    markers = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    start_markers = (SECTION, CALL)
    section = SECTION
    section_ends = (SECTION_END,)
    call_begin = CALL

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        begin, args, end, section_end = (
            grammar.mark(text, special) for text in (CALL, ARGUMENTS, CALL_END, SECTION_END)
        )
        heads = [
            f"{begin} {grammar.literal(f'functions.{tool.name}:')} INDEX {args}" for tool in tools
        ]
        return CallGrammar(
            marker=SECTION,
            body=f"{'call+' if parallel else 'call'} {section_end}",
            rules=[*grammar.delimited_calls(tools, heads, end), "INDEX: /[0-9]{1,3}/"],
        )

    def _new_call(self, *, bare: bool) -> Call:
        return KimiCall(self._tools)
