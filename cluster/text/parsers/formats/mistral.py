"""Calls in the formats of Mistral's models.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB3dE6gH9[ARGS]{}

The first form is that of tokenizers before v11, the second that of later ones; `[ARGS]` may be
missing. An id that the model writes becomes the call's id.
"""

from __future__ import annotations

import re
import string
from random import Random

from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.notations.json_call import CallReader, JsonCall
from swell.cluster.text.parsers.notations.lists import ListParser
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.random_ids import SYSTEM_RANDOM

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_ID_CHARS = 9

_NAME = re.compile(r"[-.:/\w]*")
_ID = re.compile(r"[0-9A-Za-z]*")


class MistralCall(JsonCall):
    """Reads `g[CALL_ID]aB3dE6gH9[ARGS]{}`."""

    def _read(self) -> Reading[None]:
        try:
            yield from self._read_head()
        except NotRead:
            # The read part of a marker is not read again: its bracket cannot begin another one.
            raise NotRead from None
        yield from self._read_arguments()

    def _read_head(self) -> Reading[None]:
        self.name = yield from self._run(_NAME, skip_space=False)
        if self._text[self._at] == "{":
            return
        if (yield from self._one_of(CALL_ID, ARGS, skip_space=False)) == CALL_ID:
            self.id = yield from self._run(_ID, max_chars=CALL_ID_CHARS, skip_space=False)
            if len(self.id) < CALL_ID_CHARS:
                raise NotRead
            yield from self._one_of(ARGS, skip_space=False)


class MistralParser(ListParser):
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    start_markers = (TOOL_CALLS,)
    keeps_special_tokens = True

    @staticmethod
    def random_id(random: Random = SYSTEM_RANDOM) -> str:
        alphabet = string.ascii_letters + string.digits
        return "".join(random.choice(alphabet) for _ in range(CALL_ID_CHARS))

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        if ARGS not in builder.special:
            body, rules = f'" "? {builder.call_list()}', builder.json_calls("arguments")
            return CallGrammar(marker=TOOL_CALLS, body=body, rules=rules)
        return CallGrammar(
            marker=TOOL_CALLS,
            body="call",
            more=builder.repeated(f"{builder.marker(TOOL_CALLS)} call"),
            rules=builder.named_calls(builder.marker(ARGS)),
        )

    def _new_element(self) -> CallReader:
        return CallReader()

    def _new_single(self) -> MistralCall:
        return MistralCall()
