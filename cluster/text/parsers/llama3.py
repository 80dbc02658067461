"""Calls as Llama 3.1 and later write them.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}
    <|python_tag|>brave_search.call(query="x")
    <|python_tag|>print(1)
    <function=f>{"a": 1}</function>

A call without a marker has no keys but its own, so that an answer that is JSON streams as content
from its first other key on. It may follow text; there it must name one of the request's tools,
where these are known. `NAME.call(...)` is a call of Meta's built-in tools, with arguments as Python
writes them. Other text behind the tag is Python code, to the end of the answer: a call of the code
interpreter where the request has one, else content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence

from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import SPACE, MarkedCall, behind_space, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_call import BareArguments, CallReader
from swell.cluster.text.parsers.notation import PYTHON, NotationCall
from swell.cluster.text.parsers.tools import ToolParser
from swell.cluster.text.parsers.values import json_escaped

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
CODE_TOOLS = ("code_interpreter", "python", "ipython")

_SEPARATOR = re.compile(r"[ \t\r\n;]*")
_NAME = re.compile(r"[-.\w]*")
_ARGUMENT_KEYS = ("parameters", "arguments")
_OTHER_KEYS = ("type", "id")
_CALL = ".call"


class Llama3Head(MarkedCall):
    """What follows a start marker, up to the arguments."""

    def __init__(self, marker: str) -> None:
        self._may_be_built_in = marker == PYTHON_TAG
        if marker == FUNCTION:
            self._read_run(_NAME, self._end_function, skip_space=False)
        else:
            self._state = self._at_first

    @behind_space
    def _at_first(self, text: str, at: int) -> int:
        if text[at] == "{":
            self._begin_body(CallReader(argument_keys=_ARGUMENT_KEYS))
        elif self._may_be_built_in:
            self._read_run(_NAME, self._end_built_in, skip_space=False)
        else:
            self._break("")
        return at

    def _end_built_in(self, name: str) -> None:
        self.name = name.removesuffix(_CALL)
        if self.name and self.name != name:
            self._expect({"(": self._begin_notation}, skip_space=False)
        else:
            self._break("")

    def _begin_notation(self, _: str) -> None:
        self._begin_body(NotationCall(self.name, PYTHON))

    def _end_function(self, name: str) -> None:
        self.name = name
        self._expect({">": self._begin_json}, skip_space=False)

    def _begin_json(self, _: str) -> None:
        self._begin_body(BareArguments(self.name))


class Llama3Parser(ToolParser):
    markers = (PYTHON_TAG, PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_TAG, PYTHON_START, FUNCTION)
    end_markers = (FUNCTION_END, PYTHON_END)
    keeps_special_tokens = True

    _marker = ""
    """What begins the text that is held."""

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        super().__init__(make_id, tools)
        self._matcher = Matcher(*self.start_markers, "{")
        self._code_tool = next((name for name in CODE_TOOLS if name in self._tools), "")

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_TAG,
            body="call",
            more=builder.repeated('"; " call'),
            rules=builder.json_calls("parameters"),
            bare="{",
        )

    def flush(self) -> list[AnswerDelta]:
        if self._held and self._is_code():
            self._begin_code()
        if self._state == self._in_code:
            self._deltas.append(Arguments(self._num_calls - 1, '"}'))
            return self._take()
        return super().flush()

    def _on_marker(self, marker: str) -> None:
        self._marker = marker
        if marker == "{":
            # It may follow text, where only a tool's name shows that a call is meant.
            self._begin_bare(self._tools or None)
            self._read(marker)
        else:
            self._open_call(marker, Llama3Head(marker))

    def _on_call_end(self) -> None:
        self._state = self._gap

    def _gap(self, text: str, at: int) -> int:
        end = end_of(_SEPARATOR if self._num_calls else SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end == len(text):
            return end
        self._state = self._content
        if text[end] == "{":
            self._marker = "{"
            self._begin_bare(None)
        elif text[end] == "<" and self._num_calls:
            super()._on_call_end()
        return end

    def _begin_bare(self, names: Container[str] | None) -> None:
        """A call without a marker, which must have one of these names."""
        self._open_call(
            "", CallReader(argument_keys=_ARGUMENT_KEYS, other_keys=_OTHER_KEYS, names=names)
        )

    # ----------------------------------------------------------------------------------- code

    def _is_code(self) -> bool:
        """What is held is Python code if it is no call."""
        return self._marker == PYTHON_TAG and bool(self._code_tool)

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
        self._announce(self._code_tool)
        start = f'{{{json.dumps(name)}: "{json_escaped(code)}'
        self._deltas.append(Arguments(self._num_calls - 1, start))
        self._state = self._in_code

    def _in_code(self, text: str, at: int) -> int:
        self._deltas.append(Arguments(self._num_calls - 1, json_escaped(text[at:])))
        return len(text)
