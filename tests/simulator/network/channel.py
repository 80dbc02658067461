"""Simulates the channel ends of `swell.coordinator.transport.channel`. Frames are really encoded
and decoded, and travel over the simulated network. `test_channel_contract.py` runs the same tests
with both.

Where ZeroMQ would block the thread, nothing blocks here: an inbox whose address is taken listens
later, and a closing outlet tries to deliver its messages while its process continues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from swell.configs.runtime import process as process_setup
from swell.coordinator.transport.channel import _MAX_BURST, ChannelAddress
from swell.coordinator.transport.codec import FrameDecoder, encode
from tests.simulator.kernel.process import Process
from tests.simulator.network.connection import Side
from tests.simulator.network.network import Network

_NEVER = float("inf")


class SimWaker:
    """Interrupts a wait for messages. It may be called from any loop of its process."""

    def __init__(self) -> None:
        self.woken = False
        self.waiting: SimEnd | None = None
        self._closed = False

    def wake(self) -> None:
        if not self._closed:
            self.woken = True
            if self.waiting is not None:
                self.waiting.wake()

    def clear(self) -> None:
        self.woken = False

    def close(self) -> None:
        self._closed = True


class SimEnd:
    """Base of inboxes and outlets: received messages, and the only wait for them."""

    def __init__(self, process: Process, net: Network, message_type: Any) -> None:
        self.process, self.net = process, net
        self.closed = False
        self.queue: deque[Any] = deque()
        """Messages that have arrived."""
        self._frame_decoder: FrameDecoder[Any] = FrameDecoder(message_type)
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        """The deadline of the current wait, by the clock of the process."""
        self._timer: Any = None
        """Fires at or before the deadline. It outlives a wait, so that few timers are created."""
        process.ends.append(self)

    @property
    def malformed(self) -> int:
        return self._frame_decoder.malformed

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def begin_wait(self, timeout_s: float | None) -> asyncio.Future[None]:
        """Returns a future that is done when there is a message, when `wake` is called, or after
        the timeout. `end_wait` must be called after it."""
        assert self._waiter is None, "two loops wait for one end"
        process = self.process
        waiter: asyncio.Future[None] = asyncio.Future(loop=process.loop)  # type: ignore[arg-type]
        self._waiter = waiter
        if timeout_s is not None:
            self._deadline = deadline = process.time() + timeout_s
            if self._timer is None or self._timer.when_s > deadline:
                self._set_timer(deadline)
        else:
            self._deadline = _NEVER
        return waiter

    def end_wait(self) -> None:
        self._waiter = None

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.process.loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self.process.time() >= self._deadline:
            self.wake()
        elif self._deadline != _NEVER:
            self._set_timer(self._deadline)

    def ready(self, timeout_s: float | None = 0.0, waker: SimWaker | None = None) -> bool:
        """Returns whether there is a message. It cannot wait: loops that wait await
        `SimRuntime.ready`."""
        if self.queue or timeout_s == 0.0:
            return bool(self.queue)
        raise RuntimeError("only `SimRuntime.ready` waits")

    def vanish(self) -> None:
        raise NotImplementedError

    def on_process_stopped(self) -> None:
        raise NotImplementedError

    def _detach(self) -> None:
        if self in self.process.ends:
            self.process.ends.remove(self)


class SimInbox(SimEnd):
    """Simulates `Inbox`, a ROUTER. It drops messages that it cannot deliver. The newest connection
    with an identity takes the identity over."""

    def __init__(
        self,
        process: Process,
        net: Network,
        message_type: Any,
        *,
        name: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(process, net, message_type)
        host = process.host
        name = name or f"{process.bits.getrandbits(64):016x}"
        port = port or net.free_port(host)
        self.address = ChannelAddress(host, f"ipc://@swell-{name}", f"tcp://{host}:{port}")
        self._peers: dict[bytes, Side] = {}
        net.bind(self)

    def send(self, peer: bytes, message: Any) -> None:
        self.send_to_all((peer,), message)

    def send_to_all(self, peers: Iterable[bytes], message: Any) -> None:
        if not self.process.alive:
            return
        frame, kind = encode(message), type(message).__name__
        for peer in peers:
            side = self._peers.get(peer)
            if side is not None:
                side.send(frame, kind)

    def receive(
        self, timeout_s: float = 0.0, waker: SimWaker | None = None
    ) -> Iterator[tuple[bytes, Any]]:
        if self.ready(timeout_s, waker):
            yield from self.take()

    def take(self) -> Iterator[tuple[bytes, Any]]:
        left, decode = _MAX_BURST, self._frame_decoder.decode
        while self.queue and left:  # a handover replaces `self.queue`
            side, frame = self.queue.popleft()
            left -= 1
            message = decode(frame)
            if message is not None:
                yield side.identity, message

    def close(self) -> None:
        """Closes the inbox. Messages that were sent still arrive."""
        self._end(Side.close)

    def vanish(self) -> None:
        self._end(Side.vanish)

    def _end(self, end: Callable[[Side], None]) -> None:
        if self.closed:
            return
        self.closed = True
        self.net.unbind(self)
        for side in list(self._peers.values()):
            end(side)
        self._detach()

    def sides(self) -> list[Side]:
        """The inbox's sides of its connections."""
        return list(self._peers.values())

    def on_process_stopped(self) -> None:
        for side in self._peers.values():
            _expect_silence(side)

    # ---------------------------------------------------------------- from the network

    def on_frame(self, side: Side, frame: bytes) -> None:
        self.queue.append((side, frame))
        if self._waiter is not None:
            self.wake()

    def on_open(self, side: Side) -> None:
        """Handles a new connection as ZeroMQ does. If the previous connection of the identity is
        still open, its unread messages are lost. If it has closed, they get a new
        identity of their own."""
        former = self._peers.get(side.identity)
        self._peers[side.identity] = side
        if former is not None:
            kept = (item for item in self.queue if item[0] is not former)
            self.queue = deque(kept)
            former.close()
        for other, _ in self.queue:
            if other.identity == side.identity:
                other.identity = b"\0" + self.process.bits.randbytes(4)

    def on_closed(self, side: Side) -> None:
        if self._peers.get(side.identity) is side:
            del self._peers[side.identity]


class SimOutlet(SimEnd):
    """Simulates `Outlet`, a DEALER. It keeps messages until it is connected, possibly to a
    successor at the same address, and reconnects when its connection is lost."""

    def __init__(
        self,
        process: Process,
        net: Network,
        address: ChannelAddress,
        message_type: Any,
        identity: bytes | None = None,
    ) -> None:
        super().__init__(process, net, message_type)
        self.address = address
        self.identity = identity or process.bits.randbytes(8).replace(b"\0", b"\1")
        self.label = f"{process.name}>{address.tcp.removeprefix('tcp://')}"
        self.side: Side | None = None
        """The side of the connection, or of the current handshake."""
        self.trying_since = net.kernel.now
        self.was_blocked = False
        """Whether a cut blocked its last attempt."""
        self._unsent: deque[tuple[bytes, str]] = deque()
        self._gives_up = False
        net.connect(self)

    def send(self, message: Any) -> None:
        if not self.process.alive or self.closed:
            return
        side = self.side
        if side is not None and side.open:
            side.send(encode(message), type(message).__name__)
        else:
            self._unsent.append((encode(message), type(message).__name__))

    def receive(self, timeout_s: float | None = 0.0, waker: SimWaker | None = None) -> Any:
        return self.take() if self.ready(timeout_s, waker) else None

    def take(self) -> Any:
        return self._frame_decoder.decode(self.queue.popleft())

    def close(self) -> None:
        """Closes the outlet. Messages that were sent arrive; for unsent messages it tries for
        `linger_s`."""
        self._end(self.net.options.linger_s)

    def vanish(self) -> None:
        self.closed = self._gives_up = True
        side, self.side = self.side, None
        if side is not None and side.open:
            side.vanish()
        elif side is not None:
            self._abandon(side)

    def _end(self, linger_s: float) -> None:
        if self.closed:
            return
        self.closed = True
        if self._unsent and linger_s:
            kernel = self.net.kernel
            kernel.at(kernel.now + linger_s, self.process, self._give_up)
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self._gives_up:
            return
        self._gives_up = True
        side, self.side = self.side, None
        if side is not None:
            self._abandon(side)
        self._detach()

    def _abandon(self, side: Side) -> None:
        """Closes the connection. A handshake that has no peer yet closes silently."""
        if hasattr(side, "peer"):
            side.close()
        else:
            side.closed = True

    def needs_connection(self) -> bool:
        return self.side is None and not self._gives_up and self.process.alive

    def on_process_stopped(self) -> None:
        if self.side is not None and self.side.open:
            _expect_silence(self.side)

    # ---------------------------------------------------------------- from the network

    def on_frame(self, side: Side, frame: bytes) -> None:
        self.queue.append(frame)
        if self._waiter is not None:
            self.wake()

    def on_open(self, side: Side) -> None:
        while self._unsent:
            side.send(*self._unsent.popleft())
        if self.closed:
            self._give_up()

    def on_closed(self, side: Side) -> None:
        if self.side is side:
            self.side = None
            self.net.retry_later(self)


class SimAsyncOutlet(SimOutlet):
    """Simulates `AsyncOutlet`: passes each message to a callback of the event loop."""

    def __init__(
        self,
        process: Process,
        net: Network,
        address: ChannelAddress,
        message_type: Any,
        take: Callable[[Any], None],
    ) -> None:
        super().__init__(process, net, address, message_type)
        self._take = take

    def is_connected(self) -> bool:
        return self.side is not None and self.side.open

    def close(self) -> None:
        """Closes the outlet. Messages that were sent arrive; unsent ones are dropped."""
        self._end(0.0)

    def on_frame(self, side: Side, frame: bytes) -> None:
        if self.closed:
            return
        try:
            message = self._frame_decoder.decode(frame)
            if message is not None:
                self._take(message)
        except Exception as error:
            process_setup.exit_process("channel", error)


def _expect_silence(side: Side) -> None:
    """Lets the peer give up if the process of this side stays stopped for the peer's timeout."""
    process, stops = side.process, side.process.stops
    side.peer.start_timeouts(lambda: process.stopped and process.stops == stops)
