"""What a process stands on: its clock, its random bits, its channels, and the waits of its loops.

A loop is a coroutine that awaits only `ready`, `result` and `run`. A `ThreadGround` blocks the
thread inside of each of them and never suspends, so `drive` runs such a loop on a thread. The
simulator (`tests/simulator/`) suspends there, and runs the loops of all processes in one thread on
a virtual clock. So no module that stands on a ground imports `time`, `secrets`, `random` or
`threading`; what two loops of one process share is a queue, or a value that is replaced whole.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from swell.configs.process import exit_on_error
from swell.configs.waker import Waker
from swell.coordinator.channel import (
    DEFAULT_SILENCE_S,
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class HasOutput(Protocol[T_co]):
    """A step that was handed out."""

    def get_output(self) -> T_co:
        """Waits until it is computed. Raises what the step raised."""


class Loop(Protocol):
    """A loop that runs beside its caller."""

    def join(self) -> None:
        """Waits for its end."""


class Ground(Protocol):
    """One process. Ends of channels, loops and wakers of different grounds do not mix."""

    def now(self) -> float:
        """Seconds by a monotonic clock."""

    def unix_time(self) -> float:
        """Seconds since 1970 by the clock of the host: for what outlives the process."""

    def random_bits(self, count: int) -> int: ...

    # ---------------------------------------------------------------- channels

    def inbox(
        self, message_type: Any, keys: ChannelKeys, *, name: str | None = None, port: int = 0
    ) -> Inbox[Any]: ...

    def outlet(
        self, address: ChannelAddress, message_type: Any, keys: ChannelKeys
    ) -> Outlet[Any]: ...

    def async_outlet(
        self,
        address: ChannelAddress,
        message_type: Any,
        keys: ChannelKeys,
        take: Callable[[Any], None],
    ) -> AsyncOutlet[Any]: ...

    def waker(self) -> Waker: ...

    # ---------------------------------------------------------------- loops, and where they wait

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> Loop:
        """Run a loop that the process needs: it ends the process where it fails."""

    async def ready(
        self, end: Inbox[Any] | Outlet[Any], timeout_s: float | None, waker: Waker | None = None
    ) -> bool:
        """Whether an end has a message, after waiting for one, or for the waker."""

    async def result(self, step: HasOutput[T]) -> T:
        """The output of a step, when it is computed."""

    async def run(self, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """A call that may take long: groups that form, workers that are replaced."""

    # ---------------------------------------------------------------- other threads

    def future(self) -> Future[Any]:
        """An answer that a loop gives to a caller beside it."""

    def answer(self, future: Future[T]) -> T:
        """The result, when it is there; for callers that are no loops. (In the simulator a caller
        awaits what it gets here.)"""

    def flush(self, seconds: float) -> None:
        """Let what was sent leave the process, before something that may end it."""


class ThreadGround:
    """A `Ground` of threads, ZeroMQ and the machine's clock."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        silence_s: float = DEFAULT_SILENCE_S,
        ports: range | None = None,
    ) -> None:
        """`host`: the address at which inboxes listen, at `ports`; None: any. `silence_s`: after
        which a connection is taken for dead."""
        self._host = host
        self._ports = ports
        self._silence_s = silence_s

    def now(self) -> float:
        return time.monotonic()

    def unix_time(self) -> float:
        return time.time()

    def random_bits(self, count: int) -> int:
        return secrets.randbits(count)

    def inbox(
        self, message_type: Any, keys: ChannelKeys, *, name: str | None = None, port: int = 0
    ) -> Inbox[Any]:
        return Inbox(
            message_type,
            keys,
            self._host,
            name=name,
            port=port,
            ports=self._ports,
            silence_s=self._silence_s,
        )

    def outlet(self, address: ChannelAddress, message_type: Any, keys: ChannelKeys) -> Outlet[Any]:
        return Outlet(address, message_type, keys, silence_s=self._silence_s)

    def async_outlet(
        self,
        address: ChannelAddress,
        message_type: Any,
        keys: ChannelKeys,
        take: Callable[[Any], None],
    ) -> AsyncOutlet[Any]:
        return AsyncOutlet(address, message_type, keys, take, self._silence_s)

    def waker(self) -> Waker:
        return Waker()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> Loop:
        run = exit_on_error(lambda: drive(work), name)
        thread = threading.Thread(target=run, name=f"swell-{name.replace(' ', '-')}", daemon=True)
        thread.start()
        return thread

    async def ready(
        self, end: Inbox[Any] | Outlet[Any], timeout_s: float | None, waker: Waker | None = None
    ) -> bool:
        return end.ready(timeout_s, waker)

    async def result(self, step: HasOutput[T]) -> T:
        return step.get_output()

    async def run(self, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        result: Any = call(*args)
        return result  # type: ignore[no-any-return]

    def future(self) -> Future[Any]:
        return Future()

    def answer(self, future: Future[T]) -> T:
        return future.result()

    def flush(self, seconds: float) -> None:
        time.sleep(seconds)


THREADS: Ground = ThreadGround()
"""Of a process that listens at 127.0.0.1, or nowhere."""


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends: each of its waits blocks the thread."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a loop waited for something that its ground does not offer")
