"""What the formats of tool calls share: where calls stand in an answer, and what becomes of them.

    content │ lead │ marker, head │ arguments │ rest │ lead │ marker, head │ ...
      out   │ held │     held     │    out    │  -   │ held │     held     │

*Lead* is whitespace where the answer begins or a call has ended: dropped if a call follows (or,
behind a call, nothing), content otherwise. *Head* is what a format writes before the arguments.
Once they begin the call is announced, and lead, marker and head are dropped; if they never do, all
of it is content. What follows the arguments and belongs to the call is dropped; where it goes on
differently, content begins.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from swell.cluster.text.parsers.base import Matcher, StateParser
from swell.cluster.text.parsers.calls import Call, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Tool, ToolCall
from swell.cluster.text.parsers.grammar import CallGrammar

SPACE = re.compile(r"[ \t\r\n]*")


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser(StateParser):
    """Content and tool calls. A format says what its markers begin."""

    start_markers: tuple[str, ...]
    """The markers that may stand anywhere in content and begin calls."""

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        self._make_id = make_id or self.random_id
        self._tools = {tool.name: tool for tool in tools}
        """Those that the model was shown: the schemas say what the text of an argument means."""
        self._matcher = Matcher(*self.start_markers)
        super().__init__(self._gap)
        self._leading_space: list[str] = []
        self._held: list[str] = []
        """A call that is not announced: content if it turns out to be none."""
        self._call: Call | None = None
        self._announced = False
        self._num_calls = 0
        self._call_id = ""
        """An id that the model itself gave to the call."""
        self._end: str | None = None

    @staticmethod
    def random_id() -> str:
        """An id for a call, unique, in the form that this format's chat templates want."""
        return random_call_id()

    @classmethod
    @abstractmethod
    def calls(
        cls, tools: Sequence[Tool], *, parallel: bool, special: Mapping[str, int]
    ) -> CallGrammar:
        """The grammar of what this parser reads as calls of `tools`, each with arguments that are
        valid under the tool's schema.

        `parallel`: any number of calls, otherwise one at most. `special`: text -> id of this
        tokenizer's special tokens; a marker that is none is written as text. The grammar names
        them by id, since llguidance has no other name for those like `[TOOL_CALLS]`.

        ValueError for a tool whose parameters are not those of an object, and without tools.
        """

    def until(self, marker: str) -> None:
        self._end = marker
        self._matcher = Matcher(*self.start_markers, marker)
        self._state = self._content

    def flush(self) -> list[AnswerDelta]:
        if self._call is not None and self._announced:
            self._call.flush()
            self._forward(self._call)
        rest = "".join(self._held) + self._matcher.flush()
        if rest or not self._num_calls:
            self._show(rest)
        return self._take()

    # ------------------------------------------------------------------------------- a format

    @abstractmethod
    def _on_marker(self, marker: str) -> None:
        """The next character stands behind `marker`: `_open_head`, or `_show` it."""

    def _on_call_end(self) -> None:
        """The next character stands behind an announced call."""
        self._state = self._gap

    # --------------------------------------------------------------------------------- states

    def _gap(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._leading_space.append(text[at:end])
        if end < len(text):
            self._state = self._content
        return end

    def _content(self, text: str, at: int) -> int:
        shown, marker, at = self._matcher.push(text, at)
        if shown:
            self._show(shown)
        if marker and marker == self._end:
            self.rest = text[at:]
            return len(text)
        if marker:
            self._on_marker(marker)
        return at

    def _in_call(self, text: str, at: int) -> int:
        call = self._call
        assert call is not None
        end = call.push(text, at)
        if call.known:
            self._forward(call)
        else:
            self._held.append(text[at:end])
        if call.ended:
            self._call = None
            if not self._announced:
                self._give_up(call.unread)
            elif call.unread:
                self._read_again(call.unread, [])
            else:
                self._on_call_end()
        return end

    # ---------------------------------------------------------------------------------- moves

    def _show(self, text: str) -> None:
        """Content, and whitespace before it is content too."""
        self._parts.append(Content("".join([*self._leading_space, text])))
        self._leading_space.clear()

    def _open_head(self, text: str, state: Callable[[str, int], int]) -> None:
        """`text` may begin a call, and `state` reads what follows."""
        self._held += [*self._leading_space, text]
        self._leading_space.clear()
        self._state = state

    def _give_up(self, unread: str = "") -> None:
        """What is held is no call, and may have ended with the beginning of one: `unread`. Where it
        broke content begins."""
        self._read_again(unread, self._held)

    def _read_again(self, unread: str, held: list[str]) -> None:
        """What is held ends with `unread`, where content begins."""
        text = "".join(held)
        held.clear()
        if text := text[: len(text) - len(unread)]:
            self._show(text)
        self._state = self._content
        self._read(unread)

    def _begin_call(self, call: Call) -> None:
        self._call, self._announced = call, False
        self._state = self._in_call

    def _forward(self, call: Call) -> None:
        if not self._announced:
            self._announced = True
            self._held.clear()
            self._call_id = call.id or self._call_id
            self._begin_parts(call.name)
        self._parts.append(Arguments(self._num_calls - 1, call.take()))

    def _begin_parts(self, name: str) -> None:
        """A call is certain. Reasoning that it stood in is over."""
        if self._end is not None:
            self._end, self._matcher = None, Matcher(*self.start_markers)
        call_id, self._call_id = self._call_id or self._make_id(), ""
        self._parts.append(ToolCall(self._num_calls, call_id, name))
        self._num_calls += 1
