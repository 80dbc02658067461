"""Processes whose events take as much virtual time as this machine needs for them.

An event is charged the CPU time of its thread, without the time of the simulated network, and for
each message the cost on a real channel (`channel_costs.py`). So an overloaded process lags, as a
real one would. The cost of a channel's I/O thread is counted, but delays nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulator.kernel.kernel import Call, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.channel import SimInbox
from tests.simulator.network.connection import Side
from tests.simulator.scale.channel_costs import ChannelCosts

_ALWAYS_HELD_S = 1e-9
"""Makes each event of the process wait for `enter`, because events of a slow process are held."""


class MeteredProcess(Process):
    """A process with measured costs. `loop_s` and `io_s`: CPU seconds of its thread and of its
    channels' I/O thread."""

    def __init__(self, kernel: Kernel, name: str, host: str, costs: ChannelCosts) -> None:
        super().__init__(kernel, name, host)
        self._costs = costs
        self._event_s = 0.0
        self._running = self._was_idle = False
        self._busy_until = 0.0
        self.loop_s = self.io_s = 0.0
        self.sent_bytes: Counter[str] = Counter()
        """Number of bytes sent, by type of message."""
        self.sent: Counter[str] = Counter()
        self.received = 0
        self.slow(_ALWAYS_HELD_S)

    def reset(self) -> None:
        """Resets the counters."""
        self.loop_s = self.io_s = 0.0
        self.received = 0
        self.sent_bytes.clear()
        self.sent.clear()

    def enter(self, call: Call, *args: Any) -> None:
        self._was_idle = self.kernel.now > self._busy_until
        self._event_s, self._running = -time.thread_time(), True
        super().enter(call, *args)
        self._event_s += time.thread_time()
        self._running = False
        self.loop_s += self._event_s
        if self.alive:
            self.charge(self._event_s)
            self._busy_until = self.kernel.now + self._event_s + _ALWAYS_HELD_S

    def pause(self) -> None:
        """Stops measuring the current event while the simulator itself works."""
        if self._running:
            self._event_s += time.thread_time()

    def resume(self) -> None:
        if self._running:
            self._event_s -= time.thread_time()

    def on_sent(self, num_bytes: int, kind: str, is_inbox: bool) -> None:
        costs = self._costs
        cost = costs.inbox if is_inbox else costs.outlet
        self._event_s += cost.send_s + num_bytes * costs.copy_s_per_byte
        self._count_io(num_bytes)
        self.sent_bytes[kind] += num_bytes
        self.sent[kind] += 1

    def on_received(self, num_bytes: int, is_inbox: bool) -> None:
        costs = self._costs
        cost = costs.inbox if is_inbox else costs.outlet
        self._event_s += cost.take_alone_s if self._was_idle else cost.take_s
        self._event_s += num_bytes * costs.copy_s_per_byte
        self._count_io(num_bytes)
        self.received += 1

    def _count_io(self, num_bytes: int) -> None:
        costs = self._costs
        self.io_s += costs.io_alone_s if self._was_idle else costs.io_s
        self.io_s += num_bytes * costs.io_s_per_byte


@contextmanager
def metered_messages() -> Iterator[None]:
    """Charges messages of metered processes what they cost on a real channel."""
    patched: Any = Side
    send, arrive = Side.send, Side.arrive

    def metered_send(side: Side, frame: bytes, kind: str = "") -> None:
        process = side.process
        if not isinstance(process, MeteredProcess):
            return send(side, frame, kind)
        process.pause()
        send(side, frame, kind)
        process.on_sent(len(frame), kind, isinstance(side.end, SimInbox))
        process.resume()
        return None

    def metered_arrive(side: Side, frame: Any) -> None:
        process = side.peer.process
        if isinstance(process, MeteredProcess) and frame.__class__ is bytes:
            process.on_received(len(frame), isinstance(side.peer.end, SimInbox))
        arrive(side, frame)

    patched.send, patched.arrive = metered_send, metered_arrive
    try:
        yield
    finally:
        patched.send, patched.arrive = send, arrive
