"""Requests for which there is no engine now, each with the time after which it fails."""

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
        """The request leaves the queue: it has an engine, or has ended. Once."""
        if self._timer is not None:
            self._timer.cancel()
        self._queue.remove(self._request_id)

    def fail_after(self, limit_s: float, on_timeout: Callable[[], None], grace_s: float) -> None:
        """Call `on_timeout` after `limit_s`. An event loop that is late by more than `grace_s` was
        stopped: it handles first, for `grace_s`, what arrived meanwhile."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + limit_s

        def on_timer() -> None:
            if loop.time() - due_s > grace_s:
                self.fail_after(grace_s, on_timeout, grace_s)
            else:
                on_timeout()

        self._timer = loop.call_later(limit_s, on_timer)


class PlacementQueue:
    """In the order of arrival."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of the prompts of all queued requests."""
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
