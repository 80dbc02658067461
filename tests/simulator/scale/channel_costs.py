"""Measures what a message costs on the project's real channel, on this machine, in some seconds.

Messages are sent over TCP with CURVE: many at a time, as they arrive at a busy process, and one at
a time, as they arrive at a process that waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import astuple, dataclass
from typing import TypeVar

import msgspec

from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.channel import (
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
    make_keys,
)

_ROUNDS = 3_000
_BURST = 20_000
_SMALL_BYTES, _LARGE_BYTES = 100, 100_000
_LARGE_BURST = 200
_ATTEMPTS = 3
_WAIT_S = 10.0

R = TypeVar("R", "_Burst", "_Rounds")


class _Note(msgspec.Struct, frozen=True, tag=0, array_like=True):
    body: bytes = b""


@dataclass(frozen=True)
class Cost:
    """The cost of a small message at one kind of channel end, in CPU seconds."""

    send_s: float
    take_s: float
    """Receives one of many queued messages, without waiting for it."""
    take_alone_s: float
    """Receives a single message, including the wait before it and a turn of the loop."""


@dataclass(frozen=True)
class ChannelCosts:
    """CPU seconds of the thread that sends or receives, by kind of channel end, and of an I/O
    thread for each message that it sends or receives."""

    inbox: Cost
    outlet: Cost
    io_s: float
    io_alone_s: float
    copy_s_per_byte: float
    io_s_per_byte: float

    def __str__(self) -> str:
        ends = {"inbox": self.inbox, "outlet": self.outlet}
        small = [
            f"{name} send {cost.send_s * 1e6:.1f}, take {cost.take_s * 1e6:.1f}, "
            f"alone {cost.take_alone_s * 1e6:.1f}"
            for name, cost in ends.items()
        ]
        small.append(f"I/O thread {self.io_s * 1e6:.1f}, alone {self.io_alone_s * 1e6:.1f}")
        copy_ns, io_ns = self.copy_s_per_byte * 1e9, self.io_s_per_byte * 1e9
        return f"{'; '.join(small)} us; {copy_ns:.2f} and {io_ns:.2f} ns a byte"


@dataclass(frozen=True)
class _Burst:
    send_s: float
    take_s: float
    io_s: float


@dataclass(frozen=True)
class _Rounds:
    inbox_s: float
    outlet_s: float
    io_s: float


def measure_channel() -> ChannelCosts:
    """Measures two channel ends in one process, each in its own thread. Returns the least of a few
    attempts."""
    small = _least([_measure_burst(_SMALL_BYTES, _BURST) for _ in range(_ATTEMPTS)])
    large = _least([_measure_burst(_LARGE_BYTES, _LARGE_BURST) for _ in range(_ATTEMPTS)])
    rounds = _least([_measure_rounds() for _ in range(_ATTEMPTS)])
    inbox_s, outlet_s = (max(small.take_s, s - small.send_s) for s in astuple(rounds)[:2])
    return ChannelCosts(
        Cost(small.send_s, small.take_s, inbox_s),
        Cost(small.send_s, small.take_s, outlet_s),
        small.io_s,
        rounds.io_s,
        max(0.0, large.send_s - small.send_s) / _LARGE_BYTES,
        max(0.0, large.io_s - small.io_s) / _LARGE_BYTES,
    )


def _least(attempts: list[R]) -> R:
    return type(attempts[0])(*map(min, zip(*map(astuple, attempts), strict=True)))


def _measure_burst(num_bytes: int, count: int) -> _Burst:
    """Measures the cost per message when many are sent without waiting."""
    keys = make_keys()
    inbox: Inbox[_Note] = Inbox(_Note, keys)
    outlet: Outlet[_Note] = Outlet(_by_tcp(inbox.address), _Note, keys)
    outlet.send(_Note())
    assert next(iter(inbox.receive(_WAIT_S))), "no message came"
    taken_s = [0.0]

    def take() -> None:
        left = count
        begun_s = time.thread_time()
        while left:
            left -= sum(1 for _ in inbox.receive(_WAIT_S))
        taken_s[0] = time.thread_time() - begun_s

    taker = threading.Thread(target=take)
    note, begun_s, all_s = _Note(bytes(num_bytes)), time.thread_time(), time.process_time()
    for _ in range(count):
        outlet.send(note)
    sent_s = time.thread_time() - begun_s
    taker.start()
    taker.join()
    io_s = time.process_time() - all_s - sent_s - taken_s[0]
    outlet.close()
    inbox.close()
    return _Burst(sent_s / count, taken_s[0] / count, max(0.0, io_s) / (2 * count))


def _measure_rounds() -> _Rounds:
    """Measures the cost per message when two ends answer each other."""
    keys = make_keys()
    inbox: Inbox[_Note] = Inbox(_Note, keys)
    inbox_s = [0.0]

    def echo() -> None:
        left, waker = _ROUNDS, Waker()
        begun_s = time.thread_time()
        while left:
            for peer, message in inbox.receive(_WAIT_S, waker):
                inbox.send(peer, message)
                left -= 1
        inbox_s[0] = time.thread_time() - begun_s
        waker.close()

    echoer = threading.Thread(target=echo)
    all_s = time.process_time()
    echoer.start()
    outlet_s = asyncio.run(_ask(_by_tcp(inbox.address), keys))
    echoer.join()
    io_s = time.process_time() - all_s - inbox_s[0] - outlet_s
    inbox.close()
    return _Rounds(inbox_s[0] / _ROUNDS, outlet_s / _ROUNDS, max(0.0, io_s) / (4 * _ROUNDS))


async def _ask(address: ChannelAddress, keys: ChannelKeys) -> float:
    """Returns the CPU seconds of the thread of an outlet that sends a request after each answer."""
    left = _ROUNDS
    done = asyncio.Event()

    def on_answer(message: _Note) -> None:
        nonlocal left
        left -= 1
        if left:
            outlet.send(message)
        else:
            done.set()

    begun_s = time.thread_time()
    outlet: AsyncOutlet[_Note] = AsyncOutlet(address, _Note, keys, on_answer)
    outlet.send(_Note(bytes(_SMALL_BYTES)))
    await done.wait()
    spent_s = time.thread_time() - begun_s
    outlet.close()
    return spent_s


def _by_tcp(address: ChannelAddress) -> ChannelAddress:
    return ChannelAddress("another machine", address.ipc, address.tcp)
