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

from abc import abstractmethod
from collections.abc import Callable, Sequence
from random import Random

from swell.cluster.text.parsers.base import AnswerReader
from swell.cluster.text.parsers.calls import Call
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Tool, ToolCall
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.matching import SPACE, Matcher
from swell.cluster.text.parsers.reading import NotRead, Reading
from swell.cluster.text.randomness import SYSTEM_RANDOM


class ToolParser(AnswerReader):
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
        super().__init__()
        self._leading_space: list[str] = []
        self._held: list[str] = []
        """A call that is not announced: content if it turns out to be none."""
        self._call: Call | None = None
        self._announced = False
        self._num_calls = 0
        self._stop_marker: str | None = None

    @staticmethod
    def random_id(random: Random = SYSTEM_RANDOM) -> str:
        """An id for a call, unique, in the form that this format's chat templates need."""
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

    # ------------------------------------------------------------------------------- a format

    @classmethod
    @abstractmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        """The grammar of the texts that this parser reads as calls of the builder's tools, each
        with arguments that are valid under the tool's schema. ValueError for a tool whose
        parameters are not those of an object, and without tools."""

    def _marked_call(self, marker: str) -> Call:
        """Reads a call from behind its start marker on."""
        raise NotImplementedError

    def _flush_end_marker(self) -> None:
        """The answer ends within what may be an end marker."""
        self._show("")

    # --------------------------------------------------------------------------------- reading

    def _read(self) -> Reading[None]:
        if self._stop_marker is None:
            yield from self._read_start()
        while True:
            marker = yield from self._read_content()
            yield from self._read_calls(marker)

    def _read_start(self) -> Reading[None]:
        """Before content."""
        yield from self._read_gap()

    def _read_gap(self) -> Reading[None]:
        """Whitespace that precedes content or a call."""
        yield from self._through(SPACE, self._leading_space.append)

    def _read_content(self) -> Reading[str]:
        """Up to the end of a start marker; which."""
        while (marker := (yield from self._up_to(self._matcher, self._show))) == self._stop_marker:
            self.rest = self._text[self._at :]
            self._at = len(self._text)
        return marker

    def _read_calls(self, marker: str) -> Reading[None]:
        """What the start marker begins. Content follows."""
        if (yield from self._read_call(marker, self._marked_call(marker))):
            yield from self._read_end()

    def _read_call(self, begun: str, call: Call) -> Reading[bool]:
        """`begun` may begin a call, and `call` reads what follows. Whether it was a call, of which
        nothing is unread."""
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
        """What may follow the last call."""
        if (yield from self._read_end_marker(*self.end_markers)):
            self._leading_space.clear()
            yield from self._read_gap()

    def _read_end_marker(self, *markers: str) -> Reading[str]:
        """One of these behind a call, as the end of the lead; empty: other text follows it."""
        try:
            return (yield from self._one_of(*markers, give=self._leading_space.append))
        except NotRead as error:
            lead = "".join(self._leading_space)
            self._leading_space[:] = [lead.removesuffix(error.unread)]
            self._unread(error.unread)
            return ""

    # ---------------------------------------------------------------------------- what it makes

    def _show(self, text: str) -> None:
        """Content, and whitespace before it is content too."""
        self._deltas.append(Content("".join([*self._leading_space, text])))
        self._leading_space.clear()

    def _hold(self, text: str) -> None:
        """It may begin a call."""
        self._held += [*self._leading_space, text]
        self._leading_space.clear()

    def _give_up(self, unread: str = "") -> None:
        """What is held is no call, and may have ended with the beginning of one: `unread`."""
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
        """A call is certain. It ends the reasoning before it."""
        if self._stop_marker is not None:
            self._stop_marker, self._matcher = None, Matcher(*self.start_markers)
        self._deltas.append(ToolCall(self._num_calls, call_id or self._make_id(), name))
        self._num_calls += 1
