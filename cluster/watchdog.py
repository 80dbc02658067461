"""A process of Ray Serve that stands still is ended by another process of its host, its watchdog.

Serve's controller may be on another host: where it hears nothing of a replica, that may be the
link, and clients may reach the replica all the same. So the controller is patient, and whether a
replica makes progress is found where no link is between (`watchdog_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from swell.cluster import watchdog_process
from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error_async

_PROGRAM = (sys.executable, "-I", "-S", str(Path(watchdog_process.__file__)))
_REPORTS = 10
"""Reports of progress within the limit."""
_LONGEST_PERIOD_S = 1.0
"""Between two of them."""
_SHORTEST_LIMIT_S = 3.0
"""A replica that is busy may take so long."""


def watch(name: str, stall_timeout_s: float) -> None:
    """From here on the calling event loop may not stand still for longer, or for 3 s if that is
    less. `name`: see `Watchdog`."""
    Watchdog(name, max(_SHORTEST_LIMIT_S, stall_timeout_s)).start()


class Watchdog:
    """Reports the progress of an event loop to a process that ends this one if it hears of none for
    `limit_s`. A watchdog that has ended is replaced."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name`: what its message calls this process."""
        self._name = name
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        """The writing end."""
        self._task: asyncio.Task[None] | None = None
        self._log = StructuredLogger("cluster.watchdog")

    @property
    def pid(self) -> int | None:
        """That of the watchdog."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Call it in the loop that is to be watched, once it does what may not take long."""
        self._start_process()
        work = exit_on_error_async(self._report_forever, "watchdog")
        self._task = asyncio.create_task(work)

    async def stop(self) -> None:
        """End the watchdog; nothing is watched from here on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            os.close(self._pipe)
            await asyncio.to_thread(self._end_process, self._process)
            self._process = None

    async def _report_forever(self) -> None:
        while True:
            try:
                os.write(self._pipe, b".")
            except BlockingIOError:  # it stands still itself, and has enough to read
                pass
            except BrokenPipeError:
                self._replace()
            await asyncio.sleep(min(_LONGEST_PERIOD_S, self._limit_s / _REPORTS))

    def _replace(self) -> None:
        assert self._process is not None
        os.close(self._pipe)
        self._log.warning("the watchdog has ended: replaced", status=self._process.wait())
        self._start_process()

    def _start_process(self) -> None:
        words = (os.getpid(), threading.get_native_id(), self._limit_s, self._name)
        theirs, self._pipe = os.pipe()
        try:
            # A session of its own: a signal for the group of this process stops no watchdog.
            self._process = subprocess.Popen(
                [*_PROGRAM, *map(str, words)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        os.set_blocking(self._pipe, False)

    @staticmethod
    def _end_process(process: subprocess.Popen[bytes]) -> None:
        """It reads the end of the pipe; one that is stopped does not."""
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
