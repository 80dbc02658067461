"""The environments of channel tests: ZeroMQ over TCP, or the simulated network.

A test is a coroutine with a `ChannelWorld` as argument. Inboxes are on one host; outlets are on the
same host, or on another one whose connections a `Wire` can break.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Protocol

import msgspec

from swell.coordinator.transport.channel import (
    AsyncOutlet,
    ChannelAddress,
    Inbox,
    Outlet,
    make_keys,
)
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.channel import SimAsyncOutlet, SimInbox, SimOutlet
from tests.simulator.network.network import Network, NetworkOptions
from tests.simulator.network.tcp_proxy import Direction, TcpProxy

SOON_S = 60.0
"""A timeout that expires only if a test fails."""
LONG_S = 0.4
"""Longer than a reconnection takes."""
_LOOK_S = 0.002
_LIMIT_S = 1000.0

Test = Callable[["ChannelWorld"], Coroutine[Any, Any, None]]
Seen = Callable[[ChannelAddress], ChannelAddress]
"""The address of an inbox as a peer sees it."""


class Wire(Protocol):
    """The path from another host to one inbox."""

    address: ChannelAddress
    """The inbox's address for outlets of the other host."""

    @property
    def connections(self) -> int:
        """The number of connections so far."""

    def reset(self) -> None: ...

    def hold(self, *directions: Direction) -> None: ...

    def release(self) -> None: ...


class ChannelWorld(Protocol):
    def inbox(self, *, name: str | None = None, port: int = 0) -> Any:
        """Creates an inbox for strings."""

    def outlet(self, address: ChannelAddress, identity: bytes | None = None) -> Any: ...

    def async_outlet(self, address: ChannelAddress, take: Callable[[str], None]) -> Any: ...

    def wire(self, inbox: Any) -> Wire: ...

    async def sleep(self, seconds: float) -> None: ...

    def run(self, test: Test) -> None: ...


def over_both(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine in the world that the fixture provides."""

    @wraps(test)
    def run(world: ChannelWorld, **values: Any) -> None:
        world.run(lambda world: test(world=world, **values))

    return run


def own(name: str) -> str:
    """Returns a name that no other test run on this machine uses, because names are unique per
    machine."""
    return f"{name}-{os.getpid()}"


async def take(world: ChannelWorld, inbox: Any, count: int) -> list[tuple[bytes, str]]:
    """Returns the next `count` messages, with the identities of their senders."""
    received: list[tuple[bytes, str]] = []
    for _ in range(round(SOON_S / _LOOK_S)):
        received += inbox.take()
        if len(received) >= count:
            return received
        await world.sleep(_LOOK_S)
    raise AssertionError(f"{len(received)} of {count} messages came")


async def read_next(world: ChannelWorld, outlet: Any, within_s: float = SOON_S) -> str | None:
    """Returns the next message of an outlet, or None after `within_s`."""
    for _ in range(round(within_s / _LOOK_S) + 1):
        if outlet.ready(0.0):
            message: str | None = outlet.take()
            return message
        await world.sleep(_LOOK_S)
    return None


async def until(world: ChannelWorld, holds: Callable[[], bool]) -> None:
    for _ in range(round(SOON_S / _LOOK_S)):
        if holds():
            return
        await world.sleep(_LOOK_S)
    raise AssertionError("it does not come true")


async def until_reached(world: ChannelWorld, inbox: Any, peer: bytes, outlet: Any) -> None:
    """Waits until messages to this identity arrive at this outlet."""
    for _ in range(round(SOON_S / LONG_S)):
        inbox.send(peer, "?")
        if await read_next(world, outlet, LONG_S) is not None:
            break
    while await read_next(world, outlet, LONG_S / 8) is not None:
        pass


# ---------------------------------------------------------------- ZeroMQ


class _ProxyWire:
    def __init__(self, inbox: Inbox[str]) -> None:
        self.proxy = TcpProxy(int(inbox.address.tcp.rpartition(":")[2]))
        self.address = ChannelAddress("another", "", f"tcp://127.0.0.1:{self.proxy.port}")
        self.reset, self.hold = self.proxy.reset, self.proxy.hold
        self.release = self.proxy.release

    @property
    def connections(self) -> int:
        return self.proxy.accepted


class ZmqWorld:
    """Runs tests with real channels."""

    def __init__(self, silence_s: float) -> None:
        self._keys = make_keys()
        self._silence_s = silence_s
        self._ends: list[Any] = []
        self._wires: list[_ProxyWire] = []

    def inbox(self, *, name: str | None = None, port: int = 0) -> Inbox[str]:
        inbox: Inbox[str] = Inbox(str, self._keys, name=name, port=port, silence_s=self._silence_s)
        self._ends.append(inbox)
        return inbox

    def outlet(self, address: ChannelAddress, identity: bytes | None = None) -> Outlet[str]:
        outlet: Outlet[str] = Outlet(address, str, self._keys, identity, self._silence_s)
        self._ends.append(outlet)
        return outlet

    def async_outlet(
        self, address: ChannelAddress, take: Callable[[str], None]
    ) -> AsyncOutlet[str]:
        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, self._keys, take, self._silence_s)
        self._ends.append(outlet)
        return outlet

    def wire(self, inbox: Inbox[str]) -> _ProxyWire:
        self._wires.append(_ProxyWire(inbox))
        return self._wires[-1]

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, test: Test) -> None:
        asyncio.run(self._run(test))
        for wire in self._wires:
            wire.proxy.close()

    async def _run(self, test: Test) -> None:
        try:
            await test(self)
        finally:
            for end in self._ends:
                if not end._socket.closed:
                    end._socket.linger = 0
                    end.close()


# ---------------------------------------------------------------- simulation


class _CutWire:
    def __init__(self, net: Network, inbox: SimInbox) -> None:
        self._net = net
        self.address = msgspec.structs.replace(inbox.address, machine="another")

    @property
    def connections(self) -> int:
        return sum(self._net.made.values())

    def reset(self) -> None:
        for side in self._net.connections("far", "server"):
            self._net.drop(side)

    def hold(self, *directions: Direction) -> None:
        for direction in directions:
            self._net.cut(*_PATHS[direction])

    def release(self) -> None:
        for path in _PATHS.values():
            self._net.heal(*path)


_PATHS = {"up": ("host1", "host0"), "down": ("host0", "host1")}


class SimWorld:
    """Runs tests with simulated channels: inboxes are on host0, outlets on host0 and host1."""

    def __init__(self, silence_s: float, seed: int = 0) -> None:
        self._kernel = Kernel(seed)
        self.net = Network(self._kernel, NetworkOptions.with_silence(silence_s))
        self.server = Process(self._kernel, "server", "host0")
        self._near = Process(self._kernel, "near", "host0")
        self._far = Process(self._kernel, "far", "host1")

    def inbox(self, *, name: str | None = None, port: int = 0) -> SimInbox:
        return SimInbox(self.server, self.net, str, name=name, port=port)

    def _home(self, address: ChannelAddress) -> Process:
        return self._near if address.machine == "host0" else self._far

    def outlet(self, address: ChannelAddress, identity: bytes | None = None) -> SimOutlet:
        return SimOutlet(self._home(address), self.net, address, str, identity)

    def async_outlet(self, address: ChannelAddress, take: Callable[[str], None]) -> SimAsyncOutlet:
        return SimAsyncOutlet(self._home(address), self.net, address, str, take)

    def wire(self, inbox: SimInbox) -> _CutWire:
        return _CutWire(self.net, inbox)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, test: Test) -> None:
        outcome: list[BaseException | None] = []

        async def run() -> None:
            try:
                await test(self)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            self._kernel.halt()

        process = Process(self._kernel, "test", "host2")
        self._kernel.soon(process, lambda: process.loop.create_task(run()))
        self._kernel.run(_LIMIT_S)
        assert outcome, "the test did not end"
        if outcome[0] is not None:
            raise outcome[0]
        assert not self._kernel.failures
