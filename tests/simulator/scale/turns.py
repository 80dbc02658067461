"""Runs the loop of a process without asyncio tasks and futures between its waits. A real loop
blocks its thread and has none, so their cost must not be measured."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any

from tests.simulator.kernel.runtime import SimLoopHandle, SimRuntime
from tests.simulator.network.channel import SimEnd


@types.coroutine
def _suspend(timeout_s: float | None) -> Generator[float | None, None, None]:
    yield timeout_s


class TurnRuntime(SimRuntime):
    """The runtime of a process with one loop, which waits only in `ready`."""

    _work: Coroutine[Any, Any, None]
    _end: SimEnd | None = None
    """The channel end whose message the loop waits for."""
    _deadline = float("inf")
    _timer_at = float("inf")
    """Time of the earliest timer, which outlives a wait."""

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> SimLoopHandle:
        self._work = work
        self.process.kernel.soon(self.process, self._resume)
        return SimLoopHandle(None)  # type: ignore[arg-type]

    async def ready(self, end: Any, timeout_s: float | None, waker: Any = None) -> bool:
        if not end.queue and not (waker is not None and waker.woken) and timeout_s != 0.0:
            self._end, end._waiter = end, self
            if waker is not None:
                waker.waiting = end
            await _suspend(timeout_s)
        if waker is not None:
            waker.clear()
        return bool(end.queue)

    # ---------------------------------------------------------------- acts as the future of a wait

    def done(self) -> bool:
        return self._end is None

    def set_result(self, _: None) -> None:
        """Resumes the loop, because there is a message, the waker was woken, or the time is
        over."""
        assert self._end is not None
        self._end._waiter, self._end = None, None
        self._resume()

    # ---------------------------------------------------------------- turns

    def _resume(self) -> None:
        try:
            timeout_s = self._work.send(None)
        except StopIteration:
            return
        kernel = self.process.kernel
        self._deadline = float("inf") if timeout_s is None else self.now() + timeout_s
        at = self.process.world_time(self._deadline)
        if at < self._timer_at:
            self._timer_at = at
            kernel.at(at, self.process, self._on_timer, at)

    def _on_timer(self, at: float) -> None:
        if at != self._timer_at:
            return
        self._timer_at = float("inf")
        if self._end is None:
            return
        if self.now() >= self._deadline:
            self.set_result(None)
        elif self._deadline != float("inf"):
            self._timer_at = self.process.world_time(self._deadline)
            self.process.kernel.at(self._timer_at, self.process, self._on_timer, self._timer_at)
