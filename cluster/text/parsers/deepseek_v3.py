r"""Calls as DeepSeek writes them, up to V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```
    <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...

The first is that of V3 and R1, the second of V3.1. Each is read wherever it comes; a grammar asks
for the one that the model was trained on.
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

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"

_NAME = re.compile(rf"[^\s<>]{{0,{MAX_NAME_CHARS + 1}}}")
_SPACE = re.compile(r"[ \t\r\n]*")


class DeepSeekCall(DelimitedArguments):
    ends = (FENCE_END + CALL_END, CALL_END)
    fence = "<`"

    def __init__(self) -> None:
        super().__init__()
        self._read_run(_NAME, self._end_word)

    def _end_word(self, word: str) -> None:
        self.name = word
        self._expect({SEP: self._after_sep})

    def _after_sep(self, _: str) -> None:
        self._state = self._at_name

    def _at_name(self, text: str, at: int) -> int:
        """Arguments begin, or what stood before was the type of the call."""
        if text[at] in " \t\r\n":
            return at + 1
        if text[at] == "{":
            self._begin_arguments("")
        else:
            self._read_run(_NAME, self._end_name)
        return at

    def _end_name(self, name: str) -> None:
        self.name = name
        self._expect({FENCE: self._begin_arguments})


class DeepSeekV3Parser(SectionParser):
    markers = (SECTION, SECTION_END, CALL, SEP, CALL_END)
    start_markers = (SECTION, CALL)
    section = SECTION
    section_ends = (SECTION_END,)
    call_begin = CALL

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        begin, end, section_end = (
            grammar.mark(text, special) for text in (CALL, CALL_END, SECTION_END)
        )
        heads, tail, between = cls._frames(tools, grammar.mark(SEP, special))
        more = f" ({between} {begin} call {end})*" if parallel else ""
        return CallGrammar(
            marker=SECTION,
            body=f"{begin} call {end}{more} {section_end}",
            rules=grammar.delimited_calls(tools, heads, tail),
        )

    @classmethod
    def _frames(cls, tools: Sequence[Tool], sep: str) -> tuple[list[str], str, str]:
        """Before the arguments of each tool, behind them, between calls."""
        names = [grammar.literal(f"{tool.name}\n{FENCE}\n") for tool in tools]
        heads = [f'"function" {sep} {name}' for name in names]
        return heads, grammar.literal(f"\n{FENCE_END}"), grammar.literal("\n")

    def _new_call(self, *, bare: bool) -> Call:
        return DeepSeekCall()


class DeepSeekV31Parser(DeepSeekV3Parser):
    @classmethod
    def _frames(cls, tools: Sequence[Tool], sep: str) -> tuple[list[str], str, str]:
        return [f"{grammar.literal(tool.name)} {sep}" for tool in tools], "", ""
