"""Runs calls that may never return, such as reads of a folder on an unreachable file server, and
calls into libraries that may block forever."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class TooManyCalls(RuntimeError):
    """Raised if too many calls are running, perhaps because they hang."""


class HangingCalls:
    """Runs each call in a thread of its own, so that a hanging call blocks neither other calls nor
    the exit of the process. Thread-safe."""

    def __init__(self, name: str, limit: int, limit_per_folder: int | None = None) -> None:
        """At most `limit` calls run at once, and at most `limit_per_folder` read one folder."""
        self._name, self._limit = name, limit
        self._limit_per_folder = limit if limit_per_folder is None else limit_per_folder
        self._counts: Counter[str] = Counter()
        """Folder -> number of running calls."""
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T], folder: str = "") -> Future[T]:
        """Starts the call, which reads `folder`, and returns its future. Raises TooManyCalls."""
        with self._lock:
            count = self._counts.total()
            if count >= self._limit:
                raise TooManyCalls(
                    f"{count} reads of folders are in progress and may hang; try again later"
                )
            if self._counts[folder] >= self._limit_per_folder:
                raise TooManyCalls(
                    f"{self._counts[folder]} reads of this folder are in progress and may hang; "
                    "try again later"
                )
            self._counts[folder] += 1
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        thread = threading.Thread(
            target=self._run, args=(call, folder, future), name=self._name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start more threads
            self._done(folder)
            raise TooManyCalls(f"no thread can be started ({error}); try again later") from None
        return future

    def _run(self, call: Callable[[], T], folder: str, future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._done(folder)
            future.set_exception(error)
        else:
            self._done(folder)
            future.set_result(result)

    def _done(self, folder: str) -> None:
        with self._lock:
            self._counts[folder] -= 1
            if not self._counts[folder]:
                del self._counts[folder]


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Returns the result of a call. Raises TimeoutError after `timeout_s`; its thread keeps
    running."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout_s)
