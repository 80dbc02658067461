"""Base class of parsers of tool calls: finds calls in an answer, and turns them into deltas.

    content │ lead │ start marker, head │ arguments │ rest, end marker │ lead │ start marker, ...
     sent   │ held │        held        │   sent    │        -         │ held │     held

*Lead* is whitespace at the beginning of the answer or after a call. It is dropped if a call
follows (or, after a call, nothing), and is content otherwise. *Head* is the text that a format
writes before the arguments. Once the arguments begin, the call is announced, and lead, marker and
head are dropped; if they never begin, all of it is content. Text after the arguments that belongs
to the call is dropped. The end marker is optional: an answer may end without it, and if it
continues in another way, content begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from random import Random

from swell.cluster.text.parsers.base import AnswerReader
from swell.cluster.text.parsers.call_reader import Call
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Tool, ToolCall
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.marker_search import SPACE, Matcher
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.random_ids import SYSTEM_RANDOM


class ToolParser(AnswerReader):
    """Parses content and tool calls. A subclass for a format reads the calls after its markers."""

    start_markers: tuple[str, ...]
    """Markers that may occur anywhere in content and begin calls."""
    end_markers: tuple[str, ...] = ()
    """Markers that may follow a call or several calls."""

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        self._make_id = make_id or self.random_id
        self._tools = {tool.name: tool for tool in tools}
        """The tools of the request: their schemas say what the text of an argument means."""
        self._matcher = Matcher(*self.start_markers)
        super().__init__()
        self._leading_space: list[str] = []
        self._held: list[str] = []
        """Text of a call that is not announced yet: content if it is not a call."""
        self._call: Call | None = None
        self._announced = False
        self._num_calls = 0
        self._stop_marker: str | None = None

    @staticmethod
    def random_id(random: Random = SYSTEM_RANDOM) -> str:
        """Returns a unique id for a call, in the form that this format's chat templates need."""
        return f"call_{random.getrandbits(96):024x}"

    def stop_at(self, marker: str) -> None:
        self._stop_marker = marker
        self._matcher = Matcher(*self.start_markers, marker)

    def flush(self) -> list[AnswerDelta]:
        if self._call is not None and self._announced:
            self._call.finish()
            self._forward(self._call)
        if self._literals.begun:
            self._flush_end_marker()
        rest = "".join(self._held) + self._matcher.flush()
        if rest or not self._num_calls:
            self._show(rest)
        return self._take_deltas()

    # ----------------------------------------------------------------------- hooks of formats

    @classmethod
    @abstractmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        """Returns the grammar of the texts that this parser reads as calls of the builder's tools,
        each with arguments that are valid for the tool's schema. Raises ValueError without tools,
        and for a tool whose parameters are not an object."""

    def _marked_call(self, marker: str) -> Call:
        """Returns a reader of a call, from after its start marker."""
        raise NotImplementedError

    def _flush_end_marker(self) -> None:
        """Called if the answer ends within a possible end marker."""
        self._show("")

    # --------------------------------------------------------------------------------- reading

    def _read(self) -> Reading[None]:
        if self._stop_marker is None:
            yield from self._read_start()
        while True:
            marker = yield from self._read_content()
            yield from self._read_calls(marker)

    def _read_start(self) -> Reading[None]:
        """Reads the beginning of the answer."""
        yield from self._read_gap()

    def _read_gap(self) -> Reading[None]:
        """Reads whitespace that precedes content or a call."""
        yield from self._through(SPACE, self._leading_space.append)

    def _read_content(self) -> Reading[str]:
        """Reads up to the end of a start marker, and returns the marker."""
        while (marker := (yield from self._up_to(self._matcher, self._show))) == self._stop_marker:
            self.rest = self._text[self._at :]
            self._at = len(self._text)
        return marker

    def _read_calls(self, marker: str) -> Reading[None]:
        """Reads the calls that the start marker begins. Content follows."""
        if (yield from self._read_call(marker, self._marked_call(marker))):
            yield from self._read_end()

    def _read_call(self, begun: str, call: Call) -> Reading[bool]:
        """Reads a call with `call`, after `begun`, the text that may begin it. Returns whether it
        was a call and was read completely."""
        self._hold(begun)
        self._call, self._announced = call, False
        while True:
            start, self._at = self._at, call.read(self._text, self._at)
            if call.known:
                self._forward(call)
            else:
                self._held.append(self._text[start : self._at])
            if call.ended:
                break
            yield
        self._call = None
        if not self._announced:
            self._give_up(call.unread)
        elif call.unread:
            self._unread(call.unread)
        return self._announced and not call.unread

    def _read_end(self) -> Reading[None]:
        """Reads the text that may follow the last call."""
        if (yield from self._read_end_marker(*self.end_markers)):
            self._leading_space.clear()
            yield from self._read_gap()

    def _read_end_marker(self, *markers: str) -> Reading[str]:
        """Reads one of these markers after a call, as the end of the lead, and returns it; empty if
        other text follows the lead."""
        try:
            return (yield from self._one_of(*markers, give=self._leading_space.append))
        except NotRead as error:
            lead = "".join(self._leading_space)
            self._leading_space[:] = [lead.removesuffix(error.unread)]
            self._unread(error.unread)
            return ""

    # ----------------------------------------------------------------------------------- output

    def _show(self, text: str) -> None:
        """Outputs content; whitespace held back before it is content too."""
        self._deltas.append(Content("".join([*self._leading_space, text])))
        self._leading_space.clear()

    def _hold(self, text: str) -> None:
        """Holds back text that may begin a call."""
        self._held += [*self._leading_space, text]
        self._leading_space.clear()

    def _give_up(self, unread: str = "") -> None:
        """Outputs the text that is held back, which is not a call. It may have ended with the
        beginning of one: `unread`."""
        text = "".join(self._held)
        self._held.clear()
        if text := text[: len(text) - len(unread)]:
            self._show(text)
        self._unread(unread)

    def _forward(self, call: Call) -> None:
        if not self._announced:
            self._announced = True
            self._held.clear()
            self._announce(call.name, call.id)
        self._deltas.append(Arguments(self._num_calls - 1, call.take()))

    def _announce(self, name: str, call_id: str = "") -> None:
        """Announces a call, which is certain. It ends the reasoning before it."""
        if self._stop_marker is not None:
            self._stop_marker, self._matcher = None, Matcher(*self.start_markers)
        self._deltas.append(ToolCall(self._num_calls, call_id or self._make_id(), name))
        self._num_calls += 1
