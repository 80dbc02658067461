r"""Calls as DeepSeek writes them, up to V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```
    <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...

The first is that of V3 and R1, the second of V3.1. Both parsers read both forms; a grammar requires
the one that the model was trained on.
"""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder, literal
from swell.cluster.text.parsers.json_call import DELIMITED_NAME, DelimitedCall
from swell.cluster.text.parsers.sections import SectionParser

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeekCall(DelimitedCall):
    ends = (FENCE_END + CALL_END, CALL_END)
    fence = "<`"

    def _end_word(self, word: str) -> None:
        self.name = word
        self._expect({SEP: self._after_sep})

    def _after_sep(self, _: str) -> None:
        self._state = self._at_name

    def _at_name(self, text: str, at: int) -> int:
        """Arguments begin, or the word before was the type of the call."""
        if text[at] in " \t\r\n":
            return at + 1
        if text[at] == "{":
            self._begin_arguments("")
        else:
            self._read_run(DELIMITED_NAME, self._end_name)
        return at

    def _end_name(self, name: str) -> None:
        self.name = name
        self._expect({FENCE: self._begin_arguments})


class DeepSeekV3Parser(SectionParser):
    markers = (SECTION, SECTION_END, CALL, SEP, CALL_END)
    start_markers = (SECTION, CALL)
    end_markers = (SECTION_END,)
    section = SECTION
    call_begin = CALL

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        begin, sep, end, section_end = map(builder.marker, (CALL, SEP, CALL_END, SECTION_END))
        heads, tail, between = cls._frames(builder, sep)
        more = builder.repeated(f"{between} {begin} call {end}")
        return CallGrammar(
            marker=SECTION,
            body=f"{begin} call {end}{more and ' '}{more} {section_end}",
            rules=builder.delimited_calls(heads, tail),
        )

    @classmethod
    def _frames(cls, builder: GrammarBuilder, sep: str) -> tuple[list[str], str, str]:
        """Before the arguments of each tool, after them, between calls."""
        names = [literal(f"{tool.name}\n{FENCE}\n") for tool in builder.tools]
        heads = [f'"function" {sep} {name}' for name in names]
        return heads, literal(f"\n{FENCE_END}"), literal("\n")

    def _new_call(self, *, bare: bool) -> DeepSeekCall:
        return DeepSeekCall()


class DeepSeekV31Parser(DeepSeekV3Parser):
    @classmethod
    def _frames(cls, builder: GrammarBuilder, sep: str) -> tuple[list[str], str, str]:
        return [f"{literal(tool.name)} {sep}" for tool in builder.tools], "", ""
