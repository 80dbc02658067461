"""Calls as Llama 3.1 and later write them.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}
    <|python_tag|>brave_search.call(query="x")
    <|python_tag|>print(1)
    <function=f>{"a": 1}</function>

A call without a mark has no keys but its own, so that an answer that is JSON streams as content
from its first other key on. It may stand behind text; there it must name one of the tools that the
model was shown, where these are known. `NAME.call(...)` is that of Meta's built-in tools, with
arguments as Python writes them. Other text behind the tag is Python code, to the end of the answer:
a call of the code interpreter where the model was shown one, else content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence

from swell.cluster.text.parsers import grammar
from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Tool
from swell.cluster.text.parsers.end_marked import EndMarkedCallParser
from swell.cluster.text.parsers.grammar import CallGrammar
from swell.cluster.text.parsers.json_stream import BareArguments, CallReader
from swell.cluster.text.parsers.notation import PYTHON, NotationCall
from swell.cluster.text.parsers.tools import SPACE
from swell.cluster.text.parsers.values import json_escaped

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
CODE_TOOLS = ("code_interpreter", "python", "ipython")

_SEPARATOR = re.compile(r"[ \t\r\n;]*")
_NAME = re.compile(r"[-.\w]*")
_ARGUMENT_KEYS = ("parameters", "arguments")
_OTHER_KEYS = ("type", "id")
_CALL = ".call"


class Llama3Parser(EndMarkedCallParser):
    markers = (PYTHON_TAG, PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_TAG, PYTHON_START, FUNCTION)
    end_markers = (FUNCTION_END, PYTHON_END)
    keeps_special_tokens = True

    _name = ""
    _tag = ""
    """What begins that which is held."""

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        super().__init__(make_id, tools)
        self._matcher = Matcher(*self.start_markers, "{")
        self._code_tool = next((name for name in CODE_TOOLS if name in self._tools), "")

    @classmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_TAG,
            body="call",
            more='("; " call)*' if parallel else "",
            rules=grammar.json_calls(tools, "parameters"),
            bare="{",
        )

    def flush(self) -> list[AnswerDelta]:
        if self._held and self._is_code():
            self._begin_code()
        if self._state == self._in_code:
            self._parts.append(Arguments(self._num_calls - 1, '"}'))
            return self._take()
        return super().flush()

    def _on_marker(self, marker: str) -> None:
        self._tag, self._name = marker, ""
        if marker == "{":
            # It may stand behind text, where only a tool's name shows that it is meant.
            self._begin_bare(self._tools or None)
            self._read(marker)
        else:
            self._open_head(marker, self._in_function if marker == FUNCTION else self._head)

    def _on_call_end(self) -> None:
        self._state = self._gap

    def _gap(self, text: str, at: int) -> int:
        end = end_of(_SEPARATOR if self._num_calls else SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end == len(text):
            return end
        self._state = self._content
        if text[end] == "{":
            self._tag = "{"
            self._begin_bare(None)
        elif text[end] == "<" and self._num_calls:
            self._end_matcher = Matcher(*self.end_markers)
            self._state = self._closing
        return end

    def _begin_bare(self, names: Container[str] | None) -> None:
        self._open_head("", self._head)
        self._begin_call(
            CallReader(argument_keys=_ARGUMENT_KEYS, other_keys=_OTHER_KEYS, names=names)
        )

    # ------------------------------------------------------------------------- behind a mark

    def _head(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._begin_call(CallReader(argument_keys=_ARGUMENT_KEYS))
        elif self._tag == PYTHON_TAG:
            self._state = self._in_built_in
        else:
            self._give_up()
        return end

    def _in_built_in(self, text: str, at: int) -> int:
        end = self._read_name(text, at)
        if end == len(text):
            return end
        name = self._name.removesuffix(_CALL)
        if text[end] != "(" or not name or name == self._name:
            self._give_up()
            return end
        self._held.append("(")
        self._begin_call(NotationCall(name, PYTHON))
        return end + 1

    def _in_function(self, text: str, at: int) -> int:
        end = self._read_name(text, at)
        if end == len(text):
            return end
        if text[end] != ">" or not self._name:
            self._give_up()
            return end
        self._held.append(">")
        self._begin_call(BareArguments(self._name))
        return end + 1

    def _read_name(self, text: str, at: int) -> int:
        """A longer one than a name may be ends where it is too long."""
        end = min(end_of(_NAME, text, at), at + MAX_NAME_CHARS - len(self._name))
        self._held.append(text[at:end])
        self._name += text[at:end]
        return end

    # ------------------------------------------------------------------------------- its code

    def _is_code(self) -> bool:
        """What is held is Python code if it is no call."""
        return self._tag == PYTHON_TAG and bool(self._code_tool)

    def _give_up(self, unread: str = "") -> None:
        if self._is_code():
            self._begin_code()
        else:
            super()._give_up(unread)

    def _begin_code(self) -> None:
        code = "".join(self._held).partition(PYTHON_TAG)[2]
        properties = (self._tools[self._code_tool].parameters or {}).get("properties", {})
        name = "code" if "code" in properties else next(iter(properties), "code")
        self._held.clear()
        self._begin_parts(self._code_tool)
        start = f'{{{json.dumps(name)}: "{json_escaped(code)}'
        self._parts.append(Arguments(self._num_calls - 1, start))
        self._state = self._in_code

    def _in_code(self, text: str, at: int) -> int:
        self._parts.append(Arguments(self._num_calls - 1, json_escaped(text[at:])))
        return len(text)
