"""Calls as Mistral's models write them.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB3dE6gH9[ARGS]{}

The first is that of tokenizers before v11, the second of those since; `[ARGS]` may be missing. An
id that the model gives is the call's.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.arrays import ArrayParser
from swell.cluster.text.parsers.calls import MAX_NAME_CHARS
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.json_stream import BareArguments
from swell.cluster.text.parsers.tools import SPACE

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_ID_CHARS = 9

_NAME = re.compile(r"[-.:/\w]*")
_ID = re.compile(r"[0-9A-Za-z]*")


class MistralParser(ArrayParser):
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    start_markers = (TOOL_CALLS,)
    keeps_special_tokens = True

    _in_array = False
    _name = ""
    _word = ""
    """The beginning of `[CALL_ID]` or `[ARGS]`."""

    @staticmethod
    def random_id() -> str:
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(CALL_ID_CHARS))

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        if ARGS in special:
            body, rules = "call", grammar.named_calls(tools, grammar.mark(ARGS, special))
            more = f"({grammar.mark(TOOL_CALLS, special)} call)*" if parallel else ""
        else:
            rules, more = grammar.json_calls(tools, "arguments"), ""
            body = '" "? "[" call (", " call)* "]"' if parallel else '" "? "[" call "]"'
        return CallGrammar(marker=TOOL_CALLS, body=body, more=more, rules=rules)

    def _on_marker(self, marker: str) -> None:
        self._name = self._word = self._call_id = ""
        self._open_head(marker, self._head)

    def _on_call_end(self) -> None:
        self._state = self._after_element if self._in_array else self._gap

    def _head(self, text: str, at: int) -> int:
        _, at = self._hold(SPACE, text, at)
        if at == len(text):
            return at
        self._in_array = text[at] == "["
        self._state = self._before_array if self._in_array else self._in_name
        return at

    # ----------------------------------------------------------------------- name, id, [ARGS]

    def _in_name(self, text: str, at: int) -> int:
        more, at = self._hold(_NAME, text, at)
        self._name += more
        if len(self._name) > MAX_NAME_CHARS:
            self._give_up()
            return at
        if at == len(text):
            return at
        if not self._name or text[at] not in "[{":
            self._give_up()
        elif text[at] == "[":
            self._state = self._in_bracket
        else:
            self._begin_call(BareArguments(self._name))
        return at

    def _in_bracket(self, text: str, at: int) -> int:
        expected = (ARGS,) if self._call_id else (CALL_ID, ARGS)
        word = self._word + text[at]
        if not any(one.startswith(word) for one in expected):
            self._give_up()
            return at
        self._held.append(text[at])
        self._word = "" if word in expected else word
        if word == ARGS:
            self._begin_call(BareArguments(self._name))
        elif word == CALL_ID:
            self._state = self._in_id
        return at + 1

    def _in_id(self, text: str, at: int) -> int:
        more, at = self._hold(_ID, text, at)
        self._call_id += more
        if at < len(text) and text[at] == "[" and len(self._call_id) == CALL_ID_CHARS:
            self._state = self._in_bracket
        elif at < len(text) or len(self._call_id) > CALL_ID_CHARS:
            self._give_up()
        return at
