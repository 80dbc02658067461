"""Pending calls on a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from swell.coordinator.transport.channel import ChannelTimeout

M = TypeVar("M")


class CallTable(Generic[M]):
    """Calls that wait for an answer: matched by id, not by order, and each with a deadline."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_id = 0
        self._waiting: dict[int, tuple[float, Any]] = {}

    def open(self, future: Any, timeout_s: float) -> int:
        """Registers a Future-like object and returns the id to send with the call."""
        self._next_id += 1
        self._waiting[self._next_id] = (self._clock() + timeout_s, future)
        return self._next_id

    def answer(self, call_id: int, result: M) -> None:
        """Resolves a call. Late answers, and answers to cancelled callers, are dropped."""
        _deadline, future = self._waiting.pop(call_id, (0.0, None))
        if future is not None and not future.done():
            future.set_result(result)

    def fail(self, call_id: int, error: Exception) -> None:
        _deadline, future = self._waiting.pop(call_id, (0.0, None))
        if future is not None and not future.done():
            future.set_exception(error)

    def expire(self, now: float | None = None) -> None:
        """Fails every call whose deadline has passed."""
        now = self._clock() if now is None else now
        for call_id in [i for i, (deadline, _f) in self._waiting.items() if deadline <= now]:
            self.fail(call_id, ChannelTimeout(f"call {call_id} was not answered in time"))
