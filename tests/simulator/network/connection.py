"""One connection as each of its two sides sees it: frames arrive in order as long as it lasts.

Invariant: a side learns about the other one only from what arrives, and by its own timeouts. So a
connection may be half-open: one side has given it up, and the other one still sends into it.

    Side.send --> in flight --> Side.arrive --> peer.end.on_frame
                    |
                    +-- held: this direction is cut; TCP sends again when it heals

A side is open from the end of its handshake until it closes, gives up, or receives the peer's
close. Frames that arrive at a side that is not open are lost, and answered with a reset.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import Process

if TYPE_CHECKING:
    from tests.simulator.network.network import Network

UNLIMITED = 1 << 62
LOSS = 0.3
"""The share of packets that a lossy link loses."""
RETRANSMISSION_S = 0.2
"""The time until TCP sends a packet again; it doubles with each further attempt."""
_MAX_LOSSES = 3


class _Marker:
    """A control message of the connection itself."""


READY = _Marker()
"""The last message of the handshake. It opens the side of the outlet."""
FINISHED = _Marker()
"""Tells the peer that this side has closed."""


class ConnectionEnd(Protocol):
    """The owner of a side: an inbox or an outlet."""

    process: Process

    def on_frame(self, side: Side, frame: bytes) -> None: ...

    def on_open(self, side: Side) -> None: ...

    def on_closed(self, side: Side) -> None: ...


class Side:
    """One end of a connection, and the direction from it to its peer."""

    __slots__ = (
        "_arrived",
        "_arrives_at",
        "_deliverable",
        "_flushed",
        "_net",
        "_random",
        "_sent",
        "_unacked",
        "closed",
        "connected_here",
        "end",
        "held",
        "identity",
        "label",
        "open",
        "peer",
        "process",
    )

    peer: Side

    def __init__(
        self, net: Network, end: ConnectionEnd, identity: bytes, label: str, connected_here: bool
    ) -> None:
        """`identity`: the identity of the outlet. `connected_here`: whether it is the outlet's
        side."""
        self._net = net
        self.end, self.process = end, end.process
        self.identity = identity
        self.label = label.encode()
        self.connected_here = connected_here
        self.open = False
        """Whether its handshake is complete and it has not closed."""
        self.closed = False
        self.held: deque[Any] | None = None
        """Frames held back while the direction to the peer is cut; None: not cut."""
        self._random: Random = net.kernel.random(f"delay:{label}")
        self._arrives_at = 0.0
        self._sent = self._arrived = self._flushed = 0
        self._deliverable = UNLIMITED
        """How many of the sent frames may arrive; later ones are lost."""
        self._unacked: object | None = None

    # ---------------------------------------------------------------- frames

    def send(self, frame: bytes, kind: str = "") -> None:
        """Sends a frame. `kind`: the name of its message's type."""
        net, peer = self._net, self.peer.process
        kernel = net.kernel
        delay_s = net.delay_s * (0.5 + self._random.random())
        if net.slow_hosts:
            delay_s += net.extra_delay_s(self.process.host, peer.host)
        if net.lossy_hosts:
            delay_s += self._retransmission_s()
        at = kernel.now + delay_s
        if at < self._arrives_at:
            at = self._arrives_at
        self._arrives_at = at
        self._sent += 1
        kernel.at(at, peer if peer.alive else WORLD, self.arrive, frame)
        if net.aims:
            net.on_sent(kind, self, at)

    def _retransmission_s(self) -> float:
        """Returns the additional delay of a frame whose packets were lost. Later frames wait for
        it."""
        net, delay_s = self._net, 0.0
        if not net.is_lossy(self.process.host, self.peer.process.host):
            return delay_s
        for attempt in range(_MAX_LOSSES):
            if self._random.random() >= LOSS:
                break
            delay_s += RETRANSMISSION_S * 2**attempt
        return delay_s

    def mark(self, marker: _Marker) -> None:
        """Sends READY or FINISHED after all frames."""
        net = self._net
        at = net.kernel.now + net.options.delay_s * (0.5 + self._random.random())
        self._arrives_at = at = max(at, self._arrives_at)
        net.kernel.at(at, self.peer.process, self.arrive, marker)

    def arrive(self, frame: Any) -> None:
        """Handles a frame that has arrived at the peer. Runs in the peer's process, or on its host
        if the process has terminated."""
        peer = self.peer
        if self.held is not None:
            self.held.append(frame)
            self.expect_ack()
            return
        if peer.held is not None:  # the frame arrives, but its acknowledgement does not
            self.expect_ack()
        if frame.__class__ is not bytes:
            self._arrive_marker(frame)
            return
        self._arrived += 1
        if not peer.open or self._arrived > self._deliverable:
            self._net.kernel.trace(b"lost " + self.label, frame)
            if not peer.open:
                self.reset_by_peer()
            return
        self._net.kernel.trace(self.label, frame)
        peer.end.on_frame(peer, frame)

    def _arrive_marker(self, marker: _Marker) -> None:
        peer = self.peer
        if marker is FINISHED:
            peer.close(tell=False)
        elif not peer.closed:
            peer.open = True
            peer.end.on_open(peer)

    def reset_by_peer(self) -> None:
        """Lets the peer's host answer that it knows no such connection, if the answer can arrive
        here."""
        net = self._net
        if self.open and not net.is_cut(self.peer.process.host, self.process.host):
            net.kernel.at(net.kernel.now + net.options.delay_s, self.process, self.close, False)

    # ---------------------------------------------------------------- closing

    def close(self, tell: bool = True) -> None:
        """Closes this side. `tell`: whether the peer learns of it, after all frames in flight."""
        if self.closed:
            return
        self.open, self.closed = False, True
        self._net.kernel.trace(b"closed " + self.label)
        if tell:
            self.mark(FINISHED)
        if self.peer.closed:
            self._net.forget(self)
        self.end.on_closed(self)

    def vanish(self) -> None:
        """Closes a side whose process was killed: only the first few frames in flight arrive. The
        host still sends frames again that a cut holds back."""
        least = max(self._arrived, self._flushed)
        self._deliverable = least + self._random.randint(0, max(0, self._sent - least))
        self.close()

    def lose_all(self) -> None:
        """Loses all frames in flight."""
        self._deliverable = self._arrived
        if self.held is not None:
            self.held.clear()

    def flush(self) -> None:
        """Marks everything sent so far as having left the process."""
        self._flushed = self._sent

    # ---------------------------------------------------------------- cuts

    def cut(self) -> None:
        """Blocks all frames from here to the peer."""
        if self.held is None:
            self.held = deque()
        held = self.held
        self.peer.start_timeouts(lambda: self.held is held)
        if self._sent > self._arrived:
            self.expect_ack()
        if self._net.options.heartbeat_s is not None:
            for side in (self, self.peer):
                side.expect_ack(self._random.random() * self._net.options.heartbeat_s)

    def release(self) -> None:
        """Delivers held frames, which TCP sends again. Runs where `arrive` does."""
        if self.held is None or self._net.is_cut(self.process.host, self.peer.process.host):
            return
        held, self.held = self.held, None
        if self.peer.held is None:
            self._unacked = self.peer._unacked = None
        for frame in held:
            self.arrive(frame)

    def start_timeouts(self, silent: Any) -> None:
        """Starts the timeouts of this side: it closes if `silent()` holds when they expire."""
        options, kernel = self._net.options, self._net.kernel
        if self.connected_here and not self.open:
            timeout_s = options.handshake_timeout_s
        elif options.heartbeat_s is not None:
            timeout_s = options.heartbeat_timeout_s + options.heartbeat_s * self._random.random()
        else:
            return

        def look() -> None:
            if silent():
                self.close()

        kernel.at(kernel.now + timeout_s, self.process, look)

    def expect_ack(self, after_s: float = 0.0) -> None:
        """Starts TCP's user timeout, because the acknowledgement of a packet cannot arrive."""
        timeout_s = self._net.options.user_timeout_s
        if timeout_s is None or self._unacked is not None:
            return
        self._unacked = token = object()

        def look() -> None:
            if self._unacked is token:
                self.lose_all()
                self.close(tell=False)

        kernel = self._net.kernel
        kernel.at(kernel.now + after_s + timeout_s, self.process, look)
