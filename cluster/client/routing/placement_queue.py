"""Queue of requests that no engine can run now, each with a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class QueuedRequest:
    """One request in the queue, until `release`."""

    def __init__(self, queue: PlacementQueue, request_id: str, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._queue = queue
        self._request_id = request_id
        self._timer: asyncio.TimerHandle | None = None

    def release(self) -> None:
        """Removes the request from the queue: it has an engine, or has finished. Call this once."""
        if self._timer is not None:
            self._timer.cancel()
        self._queue.remove(self._request_id)

    def fail_after(self, limit_s: float, on_timeout: Callable[[], None], grace_s: float) -> None:
        """Calls `on_timeout` after `limit_s`. If the timer is late by more than `grace_s`, the
        event loop was blocked: the timeout is then extended by `grace_s`, so that the loop first
        handles what arrived meanwhile."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + limit_s

        def on_timer() -> None:
            if loop.time() - due_s > grace_s:
                self.fail_after(grace_s, on_timeout, grace_s)
            else:
                on_timeout()

        self._timer = loop.call_later(limit_s, on_timer)


class PlacementQueue:
    """The queued requests, in order of arrival."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Prompt tokens of all queued requests."""
        self._queued: dict[str, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def request_ids(self) -> list[str]:
        return list(self._queued)

    def add(self, request_id: str, num_tokens: int) -> QueuedRequest:
        self._queued[request_id] = QueuedRequest(self, request_id, num_tokens)
        self.num_tokens += num_tokens
        return self._queued[request_id]

    def remove(self, request_id: str) -> None:
        self.num_tokens -= self._queued.pop(request_id).num_tokens
