"""Calls in the format of Llama 3.1 and later.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}
    <|python_tag|>brave_search.call(query="x")
    <|python_tag|>print(1)
    <function=f>{"a": 1}</function>

A call without a marker has only the known keys, so that an answer that is other JSON streams as
content. `NAME.call(...)` is a call of Meta's built-in tools, with arguments in Python's notation.
Other text after the tag is Python code, up to the end of the answer: a call of the code interpreter
if the request has one, otherwise content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence

from swell.cluster.text.parsers.call_reader import Call
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.marker_search import SPACE, Matcher
from swell.cluster.text.parsers.notations.json_call import CallReader, JsonCall
from swell.cluster.text.parsers.notations.notation import PYTHON, NotationCall
from swell.cluster.text.parsers.notations.typed_text import json_escaped
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.parsers.tool_parser import ToolParser

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
CODE_TOOLS = ("code_interpreter", "python", "ipython")

_SEPARATOR = re.compile(r"[ \t\r\n;]*")
_NAME = re.compile(r"[-.\w]*")
_ARGUMENT_KEYS = ("parameters", "arguments")
_OTHER_KEYS = ("type", "id")
_CALL = ".call"


class FunctionCall(JsonCall):
    """Reads the text after `<function=`."""

    def _read(self) -> Reading[None]:
        self.name = yield from self._run(_NAME, skip_space=False)
        yield from self._one_of(">", skip_space=False)
        yield from self._read_arguments()


class BuiltInCall(NotationCall):
    def _read_name(self) -> Reading[str]:
        written = yield from super()._read_name()
        name = written.removesuffix(_CALL)
        if name in ("", written):
            raise NotRead
        return name


class Llama3Parser(ToolParser):
    markers = (PYTHON_TAG, PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_TAG, PYTHON_START, FUNCTION)
    end_markers = (FUNCTION_END, PYTHON_END)
    keeps_special_tokens = True

    _marker = ""
    """The marker at the beginning of the text that is held back."""
    _in_code = False

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        super().__init__(make_id, tools)
        self._matcher = Matcher(*self.start_markers, "{")
        self._code_tool = next((name for name in CODE_TOOLS if name in self._tools), "")

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
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
        if self._in_code:
            self._deltas.append(Arguments(self._num_calls - 1, '"}'))
            return self._take_deltas()
        return super().flush()

    def _read_calls(self, marker: str) -> Reading[None]:
        self._marker = marker
        call: Call | None = None
        if marker == "{":
            # The brace may follow text, where only a tool's name shows that a call is meant.
            self._at -= 1
            call = self._bare_call(self._tools or None)
        elif marker == FUNCTION:
            self._hold(marker)
            call = FunctionCall()
        else:
            self._hold(marker)
            if (yield from self._through(SPACE, self._held.append)) == "{":
                call = CallReader(argument_keys=_ARGUMENT_KEYS)
            elif marker == PYTHON_TAG:
                call = BuiltInCall(PYTHON)
        if call is None:
            self._give_up()
        elif (yield from self._read_call("", call)):
            yield from self._read_gap()
        elif self._in_code:
            yield from self._read_code()

    def _bare_call(self, names: Container[str] | None) -> Call:
        """Returns a reader of a call without a marker, which must have one of these names (None:
        any)."""
        return CallReader(argument_keys=_ARGUMENT_KEYS, other_keys=_OTHER_KEYS, names=names)

    def _read_gap(self) -> Reading[None]:
        while True:
            space = _SEPARATOR if self._num_calls else SPACE
            char = yield from self._through(space, self._leading_space.append)
            if char == "{":
                self._marker = char
                if not (yield from self._read_call("", self._bare_call(None))):
                    return
            elif char == "<" and self._num_calls:
                if not (yield from self._read_end_marker(*self.end_markers)):
                    return
                self._leading_space.clear()
            else:
                return

    # ----------------------------------------------------------------------------------- code

    def _is_code(self) -> bool:
        """Returns whether the text that is held back is Python code if it is not a call."""
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
        self._in_code = True

    def _read_code(self) -> Reading[None]:
        while True:
            self._deltas.append(
                Arguments(self._num_calls - 1, json_escaped(self._text[self._at :]))
            )
            self._at = len(self._text)
            yield
