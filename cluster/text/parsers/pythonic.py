"""Calls as Python writes them: Llama 3.2 and 4, and what Google recommends for Gemma 3.

    [f(a=1, b="x"), g()]
    <|python_start|>[f(a=1, b="x")]<|python_end|>
    ```tool_code
    f(a=1, b="x")
    ```

A list without a mark stands where the answer begins, whitespace aside. Arguments have names and
literal values; what else Python allows is no call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, end_of
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.end_marked import EndMarkedCallParser
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.notation import PYTHON, NotationCall
from swell.cluster.text.parsers.notation_grammar import python_calls
from swell.cluster.text.parsers.tools import SPACE

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
TOOL_CODE, FENCE = "```tool_code", "```"

_NAME = re.compile(r"[-.\w]*")


class PythonicParser(EndMarkedCallParser):
    markers = (PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_START, TOOL_CODE)
    end_markers = (PYTHON_END, FENCE)

    _in_list = False
    _name = ""

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        several = ' (", " call)*' if parallel else ""
        return CallGrammar(
            marker=PYTHON_START,
            body=f'"[" call{several} "]"',
            rules=python_calls(tools),
            bare="[",
        )

    def _on_marker(self, marker: str) -> None:
        self._in_list = False
        self._open_head(marker, self._before_call)

    def _gap(self, text: str, at: int) -> int:
        end = super()._gap(text, at)
        if end < len(text) and text[end] == "[" and not self._num_calls:
            self._in_list = False
            self._open_head("", self._before_call)
        return end

    def _before_call(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == "[" and not self._in_list:
            self._in_list = True
            self._held.append("[")
            return end + 1
        self._name = ""
        self._state = self._in_name
        return end

    def _in_name(self, text: str, at: int) -> int:
        end = end_of(_NAME, text, at)
        self._held.append(text[at:end])
        self._name += text[at:end]
        if len(self._name) > MAX_NAME_CHARS:
            self._give_up()
        elif end < len(text) and text[end] == "(" and self._name:
            self._held.append("(")
            self._begin_call(NotationCall(self._name, PYTHON))
            return end + 1
        elif end < len(text):
            self._give_up()
        return end

    def _on_call_end(self) -> None:
        self._state = self._after_element

    def _after_element(self, text: str, at: int) -> int:
        """A list goes on with a comma, and a block of code with a line."""
        end = end_of(SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end == len(text):
            return end
        if self._in_list and text[end] == ",":
            self._open_head(",", self._before_call)
            return end + 1
        self._state = self._after_call
        if not self._in_list or text[end] != "]":
            return end
        self._leading_space.clear()
        return end + 1
