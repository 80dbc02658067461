"""A wake-up handle for a thread that waits for messages."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """Interrupts a wait for messages; `wake` may be called from any thread. Poll `fileno()`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        """Interrupts the wait. Does nothing after `close`, because the descriptor number may be
        reused."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Resets the wake-up."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)
