"""One connection to one engine: every lost message, in either direction, is noticed and reported
once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.engine_connection import EngineConnection, EngineId, EngineListener
from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.engine.serving.client_tracker import ClientTracker
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutputs,
    KeepAlive,
    KeepAliveReply,
    ReplaceClient,
)

MEMBER = Member(3, ChannelAddress("m", "ipc://@x", "tcp://h:1"), incarnation=7)
SILENCE_S = 10.0


@dataclass
class Outlet:
    """One connection of the ingress: the messages sent on it, and whether it is still connected."""

    identity: bytes
    take: Callable[[Any], None]
    sent: list[Any] = field(default_factory=list)
    connected: bool = True
    closed: bool = False

    def send(self, message: Any) -> None:
        assert not self.closed
        self.sent.append(message)

    def is_connected(self) -> bool:
        return self.connected

    def close(self) -> None:
        self.closed = True


class Line(ThreadRuntime, EngineListener):
    """The connection of an ingress, and the side of an engine that counts messages."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 100.0
        self.outlets: list[Outlet] = []
        self.lost: list[EngineId] = []
        self.outputs: list[EngineCoreOutputs] = []
        self.tracker = ClientTracker(SILENCE_S)
        self.connection = EngineConnection(self, MEMBER, ChannelKeys(b"", b""), self)

    def async_outlet(self, address: Any, message_type: Any, keys: Any, take: Any) -> Any:
        self.outlets.append(Outlet(b"%d" % len(self.outlets), take))
        return self.outlets[-1]

    def now(self) -> float:
        return self.time_s

    @property
    def outlet(self) -> Outlet:
        return self.outlets[-1]

    def on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.started:
            raise ZeroDivisionError("planted")
        self.outputs.append(message)

    def on_messages_lost(self, engine: EngineId) -> None:
        self.lost.append(engine)

    def deliver(self) -> list[KeepAliveReply]:
        """Delivers the sent messages to the engine and returns its replies."""
        replies = []
        for message in self.outlet.sent:
            if isinstance(message, KeepAlive):
                replies.append(self.tracker.on_keep_alive(self.outlet.identity, message, 0.0))
            else:
                self.tracker.on_message(self.outlet.identity, 0.0)
            if isinstance(message, ReplaceClient):
                self.tracker.replace(message.identities, 0.0)
        self.outlet.sent.clear()
        return replies

    def answer(self, *, arrives: bool = True, **fields: Any) -> None:
        """Sends outputs from the engine. They are lost unless `arrives`."""
        seq = self.tracker.next_seq(self.outlet.identity)
        if arrives:
            self.outlet.take(EngineCoreOutputs(seq=seq, **fields))

    def exchange(self) -> None:
        """Exchanges a keep-alive and its reply. Both arrive."""
        self.connection.check(self.now())
        outlet = self.outlet
        for reply in self.deliver():
            if not outlet.closed:
                outlet.take(reply)


@given(st.lists(st.tuples(st.sampled_from(["send", "answer", "exchange"]), st.booleans())))
def test_exactly_the_losses_are_detected_at_the_next_exchange(
    events: list[tuple[str, bool]],
) -> None:
    line, is_lost, noticed = Line(), False, 0
    for what, arrives in events:
        match what:
            case "send":
                line.connection.send(AbortRequests(["r"]))
                if arrives:
                    line.deliver()
                else:
                    line.outlet.sent.clear()
                    is_lost = True
            case "answer":
                line.answer(arrives=arrives)
                if not arrives:
                    is_lost = True
            case "exchange":
                if not arrives:  # losing a keep-alive loses nothing
                    line.connection.check(line.now())
                    line.outlet.sent.clear()
                else:
                    line.exchange()
                    assert (len(line.lost) > noticed) is is_lost
        if len(line.lost) > noticed:
            assert is_lost, "nothing was lost"
            assert line.lost[noticed:] == [EngineId(3, 7)]
            noticed, is_lost = noticed + 1, False
            assert isinstance(line.outlet.sent[0], ReplaceClient)
            line.deliver()
    line.exchange()
    assert (len(line.lost) > noticed) is is_lost
    assert [outlet.closed for outlet in line.outlets[:-1]] == [True] * (len(line.outlets) - 1)


def test_an_engine_receives_all_replaced_identities_until_it_answers() -> None:
    line = Line()
    for count in (1, 2, 3):
        line.answer(arrives=False)
        line.answer()
        assert len(line.lost) == count
        [replacement] = line.outlet.sent
        assert replacement == ReplaceClient([b"%d" % i for i in range(count)])
        line.outlet.sent.clear()  # this one is lost too
    line.exchange()  # three counts differ: a fourth connection is opened, and this request arrives
    assert line.outlet.sent == [ReplaceClient([b"0", b"1", b"2", b"3"])]
    line.exchange()
    assert all(line.tracker.is_replaced(b"%d" % i) for i in range(4))
    line.answer(arrives=False)
    line.answer()
    assert line.outlet.sent == [ReplaceClient([b"4"])]


def test_outputs_that_cannot_be_handled_count_as_lost() -> None:
    line = Line()
    line.answer(started=["r"], started_attempts=[1])
    assert line.lost == [EngineId(3, 7)] and line.outlets[0].closed


def test_an_engine_that_dropped_a_silent_ingress_is_detected() -> None:
    line = Line()
    line.connection.send(AbortRequests(["r"]))
    line.exchange()
    assert line.lost == []
    for second in range(20):
        line.tracker.advance(float(second))
    assert line.tracker.drop_silent() == [b"0"]
    line.exchange()
    assert line.lost == [EngineId(3, 7)]


def test_a_broken_connection_sends_no_keep_alives() -> None:
    """Otherwise an unbounded number of keep-alives would queue up."""
    line = Line()
    line.outlet.connected = False
    begun = line.now()
    assert line.connection.check(begun + 4.0) >= 4.0
    assert line.outlet.sent == []
    line.outlet.connected = True
    assert line.connection.check(begun + 5.0) == 0.0
    assert line.outlet.sent == [KeepAlive(0)]


def test_silence_before_a_disconnect_counts() -> None:
    """The disconnect is noticed only after some silence, which must be counted."""
    line = Line()
    line.time_s += 5.0
    line.exchange()
    line.time_s += 9.0
    assert line.connection.check(line.now()) == 0.0, "an engine in a long step is reached"
    line.outlet.connected = False
    line.time_s += 1.0
    assert line.connection.check(line.now()) == 10.0


def test_an_engine_that_sends_but_does_not_answer_counts_as_unreachable() -> None:
    """If packets are lost in one direction, outputs arrive as long as the engine has work."""
    line = Line()
    line.time_s += 5.0
    line.exchange()
    for _ in range(8):
        line.time_s += 1.0
        line.answer()
        assert line.connection.check(line.now()) == 0.0
    line.outlet.connected = False
    line.time_s += 2.0
    assert line.connection.check(line.now()) == 10.0
