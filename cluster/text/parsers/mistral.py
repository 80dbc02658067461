"""Calls as Mistral's models write them.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB3dE6gH9[ARGS]{}

The first is that of tokenizers before v11, the second of those since; `[ARGS]` may be missing. An
id that the model writes is the call's.
"""

from __future__ import annotations

import re
import secrets
import string

from swell.cluster.text.parsers.calls import MarkedCall
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_call import BareArguments, CallReader
from swell.cluster.text.parsers.lists import ListParser

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_ID_CHARS = 9

_NAME = re.compile(r"[-.:/\w]*")
_ID = re.compile(r"[0-9A-Za-z]*")


class MistralHead(MarkedCall):
    """Name and id: `g[CALL_ID]aB3dE6gH9[ARGS]`."""

    def __init__(self) -> None:
        self._read_run(_NAME, self._end_name, skip_space=False)

    def _end_name(self, name: str) -> None:
        self.name = name
        self._state = self._after_name

    def _after_name(self, text: str, at: int) -> int:
        if text[at] == "{":
            self._end_head("")
        else:
            self._expect({CALL_ID: self._begin_id, ARGS: self._end_head}, skip_space=False)
        return at

    def _begin_id(self, _: str) -> None:
        self._read_run(_ID, self._end_id, max_chars=CALL_ID_CHARS, skip_space=False)

    def _end_id(self, call_id: str) -> None:
        self.id = call_id
        if len(call_id) == CALL_ID_CHARS:
            self._expect({ARGS: self._end_head}, skip_space=False)
        else:
            self._break("")

    def _end_head(self, _: str) -> None:
        self._begin_body(BareArguments(self.name, call_id=self.id))

    def _break(self, unread: str) -> None:
        """What was read of a marker is not read again: its bracket begins no other."""
        super()._break("")


class MistralParser(ListParser):
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    start_markers = (TOOL_CALLS,)
    keeps_special_tokens = True

    @staticmethod
    def random_id() -> str:
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(CALL_ID_CHARS))

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
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

    def _new_single(self) -> MistralHead:
        return MistralHead()
