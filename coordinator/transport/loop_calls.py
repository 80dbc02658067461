"""Calls from other threads that a loop runs, because only the loop may access its state."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.runtime import Runtime

T = TypeVar("T")


@dataclass(slots=True)
class _Waiting(Generic[T]):
    """A call that is answered later."""

    is_over: Callable[[], bool]
    """Whether the condition that the call waits for is true."""
    deadline: float
    finish: Callable[[], T]
    """Returns the answer, when `is_over` is true or at the deadline."""


class LoopCalls:
    """Runs calls in a loop: `call` and `call_and_wait` are for other threads, the rest for the
    loop."""

    def __init__(self, runtime: Runtime, waker: Waker) -> None:
        """`waker` interrupts the loop's wait."""
        self._runtime = runtime
        self._waker = waker
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._waiting: list[tuple[_Waiting[Any], Future[Any]]] = []

    def call(self, run: Callable[[], T]) -> T:
        """Runs a function in the loop and returns its result, or raises its exception (see
        `Runtime.answer`)."""
        future: Future[T] = self._runtime.future()
        return self._put(run, future)

    def call_and_wait(
        self,
        timeout_s: float,
        is_over: Callable[[], bool],
        finish: Callable[[], T],
        begin: Callable[[], object] = lambda: None,
    ) -> T:
        """Runs `begin` in the loop; when `is_over` returns true, or after the timeout, runs
        `finish` there and returns its result. All three may raise."""

        def run() -> _Waiting[T]:
            begin()
            return _Waiting(is_over, self._runtime.now() + timeout_s, finish)

        future: Future[T] = self._runtime.future()
        return self._put(run, future)

    def _put(self, run: Callable[[], T | _Waiting[T]], future: Future[T]) -> T:
        self._calls.put((run, future))
        self._waker.wake()
        return self._runtime.answer(future)

    def run(self, now: float) -> None:
        """Runs new calls, and answers those whose wait is over."""
        while not self._calls.empty():
            self._answer(*self._calls.get())
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for call, future in waiting:
            if now >= call.deadline or call.is_over():
                self._answer(call.finish, future)
            else:
                self._waiting.append((call, future))

    def wait_s(self, now: float) -> float:
        """Returns the seconds until the next deadline."""
        if not self._waiting:
            return float("inf")
        return max(0.0, min([call.deadline for call, _future in self._waiting]) - now)

    def _answer(self, run: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = run()
        except Exception as error:
            future.set_exception(error)
            return
        if isinstance(result, _Waiting):
            self._waiting.append((result, future))
        else:
            future.set_result(result)
