"""What the formats of tool calls share: where an answer has calls, and which deltas they become.

    content │ lead │ start marker, head │ arguments │ rest, end marker │ lead │ start marker, ...
      out   │ held │        held        │    out    │        -         │ held │     held

*Lead* is whitespace where the answer begins or a call has ended: dropped if a call follows (or,
after a call, nothing), content otherwise. *Head* is what a format writes before the arguments.
Once they begin the call is announced, and lead, marker and head are dropped; if they never do, all
of it is content. What follows the arguments and belongs to the call is dropped. No end marker is
required: an answer may end without it, and where it goes on differently, content begins.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from swell.cluster.text.parsers.base import Matcher, StateParser
from swell.cluster.text.parsers.calls import SPACE, Call, LiteralMatcher, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Tool, ToolCall
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser(StateParser):
    """Content and tool calls. A format says what its markers begin."""

    start_markers: tuple[str, ...]
    """The markers that may occur anywhere in content and begin calls."""
    end_markers: tuple[str, ...] = ()
    """One of them may follow a call, or several calls."""

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        self._make_id = make_id or self.random_id
        self._tools = {tool.name: tool for tool in tools}
        """Those of the request: the schemas say what the text of an argument means."""
        self._matcher = Matcher(*self.start_markers)
        super().__init__(self._gap)
        self._leading_space: list[str] = []
        self._held: list[str] = []
        """A call that is not announced: content if it turns out to be none."""
        self._call: Call | None = None
        self._announced = False
        self._num_calls = 0
        self._end_of_call: LiteralMatcher
        self._stop_marker: str | None = None

    @staticmethod
    def random_id() -> str:
        """An id for a call, unique, in the form that this format's chat templates need."""
        return random_call_id()

    @classmethod
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
        return cls._call_grammar(GrammarBuilder(tools, parallel, special))

    def stop_at(self, marker: str) -> None:
        self._stop_marker = marker
        self._matcher = Matcher(*self.start_markers, marker)
        self._state = self._content

    def flush(self) -> list[AnswerDelta]:
        if self._call is not None and self._announced:
            self._call.flush()
            self._forward(self._call)
        if self._state == self._after_call and self._end_of_call.begun:
            self._flush_end_marker()
        rest = "".join(self._held) + self._matcher.flush()
        if rest or not self._num_calls:
            self._show(rest)
        return self._take()

    # ------------------------------------------------------------------------------- a format

    @classmethod
    @abstractmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        """As `calls`."""

    @abstractmethod
    def _on_marker(self, marker: str) -> None:
        """The next character follows the start marker: `_open_call`, or `_show` the marker."""

    def _on_call_end(self) -> None:
        """The next character follows an announced call."""
        self._end_of_call = LiteralMatcher(*self.end_markers)
        self._state = self._after_call

    def _on_end_marker(self, marker: str) -> None:
        self._leading_space.clear()
        self._state = self._gap

    def _on_no_end_marker(self, begun: str) -> None:
        """The lead ends with `begun`, where other text begins instead of an end marker."""
        lead = "".join(self._leading_space)
        self._leading_space[:] = [lead.removesuffix(begun)]
        self._state = self._content
        self._read(begun)

    def _flush_end_marker(self) -> None:
        """The answer ends within what may be an end marker."""
        self._on_no_end_marker(self._end_of_call.begun)

    # --------------------------------------------------------------------------------- states

    def _gap(self, text: str, at: int) -> int:
        end = self._read_lead(text, at)
        if end < len(text):
            self._state = self._content
        return end

    def _content(self, text: str, at: int) -> int:
        shown, marker, at = self._matcher.push(text, at)
        if shown:
            self._show(shown)
        if marker and marker == self._stop_marker:
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
            if call.body is not None:
                self._begin_call(call.body)
            elif not self._announced:
                self._give_up(call.unread)
            elif call.unread:
                self._read_again(call.unread, [])
            else:
                self._on_call_end()
        return end

    def _after_call(self, text: str, at: int) -> int:
        start = at
        found, possible, at = self._end_of_call.push(text, at)
        self._leading_space.append(text[start:at])
        if found is not None:
            self._on_end_marker(found)
        elif not possible:
            self._on_no_end_marker(self._end_of_call.begun)
        return at

    # ------------------------------------------------------------------------------ transitions

    def _read_lead(self, text: str, at: int) -> int:
        end = end_of(SPACE, text, at)
        self._leading_space.append(text[at:end])
        return end

    def _show(self, text: str) -> None:
        """Content, and whitespace before it is content too."""
        self._deltas.append(Content("".join([*self._leading_space, text])))
        self._leading_space.clear()

    def _hold(self, text: str, state: Callable[[str, int], int]) -> None:
        """`text` may begin a call, and `state` reads what follows."""
        self._held += [*self._leading_space, text]
        self._leading_space.clear()
        self._state = state

    def _open_call(self, text: str, call: Call) -> None:
        """`text` may begin a call, and `call` reads what follows."""
        self._hold(text, self._in_call)
        self._begin_call(call)

    def _begin_call(self, call: Call) -> None:
        self._call, self._announced = call, False
        self._state = self._in_call

    def _give_up(self, unread: str = "") -> None:
        """What is held is no call, and may have ended with the beginning of one: `unread`. Content
        begins there."""
        self._read_again(unread, self._held)

    def _read_again(self, unread: str, held: list[str]) -> None:
        """What is held ends with `unread`, where content begins."""
        text = "".join(held)
        held.clear()
        if text := text[: len(text) - len(unread)]:
            self._show(text)
        self._state = self._content
        self._read(unread)

    def _forward(self, call: Call) -> None:
        if not self._announced:
            self._announced = True
            self._held.clear()
            self._announce(call.name, call.id)
        self._deltas.append(Arguments(self._num_calls - 1, call.take()))

    def _announce(self, name: str, call_id: str = "") -> None:
        """A call is certain. It ends the reasoning before it."""
        if self._stop_marker is not None:
            self._stop_marker, self._matcher = None, Matcher(*self.start_markers)
        self._deltas.append(ToolCall(self._num_calls, call_id or self._make_id(), name))
        self._num_calls += 1
