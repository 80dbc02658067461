r"""Calls in the format of DeepSeek up to V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```
    <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>...

The first form is that of V3 and R1, the second that of V3.1. Both parsers read both forms; a
grammar requires the form that the model was trained on.
"""

from __future__ import annotations

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder, literal
from swell.cluster.text.parsers.notations.json_call import DELIMITED_NAME, JsonCall
from swell.cluster.text.parsers.notations.sections import SectionParser
from swell.cluster.text.parsers.text_reader import Reading

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeekCall(JsonCall):
    fence = "<`"

    def _read(self) -> Reading[None]:
        self.name = yield from self._run(DELIMITED_NAME)
        yield from self._one_of(SEP)
        if (yield from self._next()) != "{":
            # The previous word was the type of the call.
            self.name = yield from self._run(DELIMITED_NAME)
            yield from self._one_of(FENCE)
        yield from self._read_arguments()
        yield from self._one_of(FENCE_END + CALL_END, CALL_END)


class DeepSeekV3Parser(SectionParser):
    markers = (SECTION, SECTION_END, CALL, SEP, CALL_END)
    start_markers = (SECTION, CALL)
    end_markers = (SECTION_END,)
    section = SECTION
    call_begin = CALL

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
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
        """Returns the expressions before the arguments of each tool, after them, and between
        calls."""
        names = [literal(f"{tool.name}\n{FENCE}\n") for tool in builder.tools]
        heads = [f'"function" {sep} {name}' for name in names]
        return heads, literal(f"\n{FENCE_END}"), literal("\n")

    def _new_call(self, *, bare: bool) -> DeepSeekCall:
        return DeepSeekCall()


class DeepSeekV31Parser(DeepSeekV3Parser):
    @classmethod
    def _frames(cls, builder: GrammarBuilder, sep: str) -> tuple[list[str], str, str]:
        return [f"{literal(tool.name)} {sep}" for tool in builder.tools], "", ""
