"""Runs calls that may never return, such as reads of a folder on an unreachable file server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class TooManyCalls(RuntimeError):
    """Raised if too many calls are running, perhaps because they hang."""


class HangingCalls:
    """Runs each call in a thread of its own, so that a hanging call blocks neither other calls nor
    the exit of the process. Thread-safe."""

    def __init__(self, name: str, limit: int) -> None:
        """`limit` is the maximum number of running calls."""
        self._name, self._limit = name, limit
        self._count = 0
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Starts the call and returns its future. Raises TooManyCalls."""
        with self._lock:
            if self._count >= self._limit:
                raise TooManyCalls(
                    f"{self._count} reads of folders are in progress and may hang; try again later"
                )
            self._count += 1
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        thread = threading.Thread(
            target=self._run, args=(call, future), name=self._name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start more threads
            self._done()
            raise TooManyCalls(f"no thread can be started ({error}); try again later") from None
        return future

    def _run(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._done()
            future.set_exception(error)
        else:
            self._done()
            future.set_result(result)

    def _done(self) -> None:
        with self._lock:
            self._count -= 1
