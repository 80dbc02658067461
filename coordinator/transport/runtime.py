"""The environment of a process: its clock, its random bits, its channels, and the waits of its
loops.

A loop is a coroutine that awaits only `ready`, `result` and `run`. A `ThreadRuntime` blocks the
thread inside each of them and never suspends, so `drive` can run such a loop on a thread. The
simulator (`tests/simulator/`) suspends there, and runs the loops of all processes in one thread
with a virtual clock. Therefore modules that use a runtime never import `time`, `secrets`, `random`
or `threading`. Two loops of one process share only queues, or values that are replaced as a whole.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from swell.configs.runtime.process import exit_on_error
from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.channel import (
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
    """A submitted step."""

    def get_output(self) -> T_co:
        """Waits until the step is computed. Raises the step's exception."""


class Loop(Protocol):
    """A loop that runs concurrently with its caller."""

    def join(self) -> None:
        """Waits until the loop has finished."""


class Runtime(Protocol):
    """The environment of one process. Channel ends, loops and wakers of different runtimes must not
    be mixed."""

    def now(self) -> float:
        """Returns seconds by a monotonic clock."""

    def unix_time(self) -> float:
        """Returns seconds since 1970 by the clock of the host, for data that outlives the
        process."""

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

    # ---------------------------------------------------------------- loops and their waits

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> Loop:
        """Starts a loop that the process needs: if the loop fails, the process exits."""

    async def ready(
        self, end: Inbox[Any] | Outlet[Any], timeout_s: float | None, waker: Waker | None = None
    ) -> bool:
        """Waits for a message or for the waker. Returns whether the end has a message."""

    async def result(self, step: HasOutput[T]) -> T:
        """Returns the output of a step when it is computed."""

    async def run(self, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """Runs a call that may take long, such as forming groups or replacing workers."""

    # ---------------------------------------------------------------- other threads

    def future(self) -> Future[Any]:
        """Returns a future with which a loop answers a caller outside of it."""

    def answer(self, future: Future[T]) -> T:
        """Waits for the result; for callers that are not loops. (In the simulator, a caller awaits
        the return value.)"""

    def flush(self, seconds: float) -> None:
        """Gives sent messages time to leave the process, before something that may kill it."""


class ThreadRuntime:
    """A `Runtime` with threads, ZeroMQ and the machine's clock."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        silence_s: float = DEFAULT_SILENCE_S,
        ports: range | None = None,
    ) -> None:
        """`host`: the address on which inboxes listen; `ports`: their ports, None: any.
        `silence_s`: time without data after which a connection counts as dead."""
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


THREADS: Runtime = ThreadRuntime()
"""The runtime of a process that listens on 127.0.0.1, or not at all."""


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends: each of its waits blocks the thread."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("the coroutine waited for something that this runtime cannot wait for")
