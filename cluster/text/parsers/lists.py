"""Calls that are elements of one list: `[{"name": "f", "arguments": {}}, ...]`, `[f(), g()]`."""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.calls import SPACE, Call, end_of
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_call import CallReader
from swell.cluster.text.parsers.notation import PYTHON, NotationHead
from swell.cluster.text.parsers.notation_grammar import python_calls
from swell.cluster.text.parsers.tools import ToolParser

PHI_OPEN, PHI_CLOSE, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
TOOL_CODE, FENCE = "```tool_code", "```"


class ListParser(ToolParser):
    _in_list = False

    @abstractmethod
    def _new_element(self) -> Call:
        """Reads a call of the list."""

    @abstractmethod
    def _new_single(self) -> Call | None:
        """Reads a call that has no list around it; None: there are none."""

    def _on_marker(self, marker: str) -> None:
        self._hold(marker, self._before_list)

    def _before_list(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._held.append(text[at:end])
        if end == len(text):
            return end
        self._in_list = text[end] == "["
        if self._in_list:
            self._open_call("[", self._new_element())
            return end + 1
        single = self._new_single()
        if single is None:
            self._give_up()
        else:
            self._begin_call(single)
        return end

    def _on_call_end(self) -> None:
        if self._in_list:
            self._state = self._after_element
        else:
            super()._on_call_end()

    def _after_element(self, text: str, at: int) -> int:
        end = self._read_lead(text, at)
        if end == len(text):
            return end
        if text[end] == ",":
            self._open_call(",", self._new_element())
            return end + 1
        super()._on_call_end()
        if text[end] == "]":
            self._leading_space.clear()
            return end + 1
        return end


class Phi4Parser(ListParser):
    """Of Phi-4-mini, and Granite 3, which writes no end marker.

        <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>
        functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]

    The first is Phi's own form; the second that of the prompt which vLLM's and Ollama's users give
    it.
    """

    markers = (PHI_OPEN, PHI_CLOSE)
    start_markers = (PHI_OPEN, FUNCTOOLS)
    end_markers = (PHI_CLOSE,)

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PHI_OPEN,
            body=f"{builder.call_list()} {builder.marker(PHI_CLOSE)}",
            rules=builder.json_calls("arguments"),
        )

    def _new_element(self) -> CallReader:
        return CallReader(argument_keys=("arguments", "parameters"))

    def _new_single(self) -> None:
        return None


class PythonicParser(ListParser):
    """As Python writes calls: Llama 3.2 and 4, and what Google recommends for Gemma 3.

        [f(a=1, b="x"), g()]
        <|python_start|>[f(a=1, b="x")]<|python_end|>
        ```tool_code
        f(a=1, b="x")
        ```

    A list without a marker is read where the answer begins, behind whitespace. Arguments have names
    and literal values; what else Python allows is no call.
    """

    markers = (PYTHON_START, PYTHON_END)
    start_markers = (PYTHON_START, TOOL_CODE)
    end_markers = (PYTHON_END, FENCE)

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return CallGrammar(
            marker=PYTHON_START,
            body=builder.call_list(),
            rules=python_calls(builder.tools),
            bare="[",
        )

    def _gap(self, text: str, at: int) -> int:
        end = super()._gap(text, at)
        if end < len(text) and text[end] == "[" and not self._num_calls:
            self._hold("", self._before_list)
        return end

    def _new_element(self) -> NotationHead:
        return NotationHead(PYTHON)

    _new_single = _new_element
