r"""Calls in the format of Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
    <|tool_call_end|><|tool_calls_section_end|>

`functions.f:0` is the call's id, which the templates need in the history. Some models write only
the name or, if there is one tool, only the number: that is the id then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder, literal
from swell.cluster.text.parsers.notations.json_call import DELIMITED_NAME, JsonCall
from swell.cluster.text.parsers.notations.sections import SectionParser
from swell.cluster.text.parsers.text_reader import NotRead, Reading

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_NUMBERED = re.compile(r"(?:functions\.)?(.+):[0-9]+")


class KimiCall(JsonCall):
    fence = "<"

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self._tools = tools

    def _read(self) -> Reading[None]:
        self.id = yield from self._run(DELIMITED_NAME)
        self.name = self._name(self.id)
        if not self.name:
            raise NotRead
        yield from self._one_of(ARGUMENTS)
        yield from self._read_arguments()
        yield from self._one_of(CALL_END)

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
    end_markers = (SECTION_END,)
    section = SECTION
    call_begin = CALL

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        begin, arguments, end = map(builder.marker, (CALL, ARGUMENTS, CALL_END))
        heads = [
            f"{begin} {literal(f'functions.{tool.name}:')} INDEX {arguments}"
            for tool in builder.tools
        ]
        calls = "call+" if builder.parallel else "call"
        return CallGrammar(
            marker=SECTION,
            body=f"{calls} {builder.marker(SECTION_END)}",
            rules=[*builder.delimited_calls(heads, end), "INDEX: /[0-9]{1,3}/"],
        )

    def _new_call(self, *, bare: bool) -> KimiCall:
        return KimiCall(self._tools)
