"""What ends a wait for messages."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """Ends a wait for messages, from any thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        """Nothing happens once it is closed: its number may be another file's."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget that it was woken."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)
