"""The runtime of a simulated process: its waits suspend the coroutine, and everything takes virtual
time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys
from tests.simulator.kernel.process import Process
from tests.simulator.network.channel import SimAsyncOutlet, SimEnd, SimInbox, SimOutlet, SimWaker
from tests.simulator.network.network import Network

T = TypeVar("T")

_MAX_LOOKS = 10_000
"""Number of `ready` calls without a wait between them after which a loop counts as endless."""


class SimAnswer(asyncio.Future[Any]):
    """A future with which a loop answers a caller outside of it, like `concurrent.futures.Future`,
    except that the caller awaits it."""

    def set_running_or_notify_cancel(self) -> bool:
        return not self.cancelled()


class SimLoopHandle:
    """A loop that was spawned."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task

    def join(self) -> None:
        """Does nothing: no code can block here, and the loop finishes at its next event."""


class SimRuntime:
    """Implements `swell.coordinator.transport.runtime.Runtime` for one process."""

    def __init__(self, process: Process, net: Network) -> None:
        self.process, self.net = process, net
        self.now = process.time
        self._looks = 0

    def unix_time(self) -> float:
        return self.process.kernel.now

    def random_bits(self, count: int) -> int:
        return self.process.bits.getrandbits(count)

    # ---------------------------------------------------------------- channels

    def inbox(
        self, message_type: Any, keys: ChannelKeys, *, name: str | None = None, port: int = 0
    ) -> Any:
        return SimInbox(self.process, self.net, message_type, name=name, port=port)

    def outlet(self, address: ChannelAddress, message_type: Any, keys: ChannelKeys) -> Any:
        return SimOutlet(self.process, self.net, address, message_type)

    def async_outlet(
        self,
        address: ChannelAddress,
        message_type: Any,
        keys: ChannelKeys,
        take: Callable[[Any], None],
    ) -> Any:
        return SimAsyncOutlet(self.process, self.net, address, message_type, take)

    def waker(self) -> Any:
        return SimWaker()

    # ---------------------------------------------------------------- loops and their waits

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> SimLoopHandle:
        return SimLoopHandle(self.process.loop.create_task(self._guarded(name, work), name=name))

    async def _guarded(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.process.fail(name, error)

    async def ready(self, end: Any, timeout_s: float | None, waker: Any = None) -> bool:
        assert isinstance(end, SimEnd) and end.process is self.process, "an end of another runtime"
        if timeout_s is not None and timeout_s <= 0.0:
            self._looks += 1
            assert self._looks < _MAX_LOOKS, f"{self.process.name} looks without end"
            return bool(end.queue)
        self._looks = 0
        if waker is not None and waker.woken:
            waker.woken = False
            return bool(end.queue)
        if end.queue:
            return True
        if waker is not None:
            waker.waiting = end
        try:
            await end.begin_wait(timeout_s)
        finally:
            end.end_wait()
            if waker is not None:
                waker.waiting = None
                waker.woken = False
        return bool(end.queue)

    async def result(self, step: Any) -> Any:
        """Returns the output of a step. A step that takes virtual time has `async computed()`,
        which waits for the computation and does not raise; `get_output` raises the exception of the
        step."""
        self._looks = 0
        computed = getattr(step, "computed", None)
        if computed is not None:
            await computed()
        return step.get_output()

    async def run(self, call: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        self._looks = 0
        result: Any = call(*args)
        if inspect.isawaitable(result):
            result = await result
        return result  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- other loops of the process

    def future(self) -> Any:
        return SimAnswer(loop=self.process.loop)  # type: ignore[arg-type]

    def answer(self, future: Any) -> Any:
        """Returns the future itself, because the caller awaits it."""
        return future

    def flush(self, seconds: float) -> None:
        """Makes everything that was sent arrive, even if the process is killed right afterwards."""
        for end in self.process.ends:
            if isinstance(end, SimInbox):
                for side in end.sides():
                    side.flush()
            elif isinstance(end, SimOutlet) and end.side is not None:
                end.side.flush()
