"""Kills a process of Ray Serve that hangs, from another process on its host: its watchdog.

Serve's controller may be on another host. If it does not hear from a replica, only the link may be
broken, and clients may still reach the replica. So the controller is patient, and the progress of a
replica is checked on its own host, without a link (`watchdog_process.py`).
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
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import exit_on_error_async

_PROGRAM = (sys.executable, "-I", "-S", str(Path(watchdog_process.__file__)))
_REPORTS = 10
"""The number of progress reports within the limit."""
_LONGEST_PERIOD_S = 1.0
"""The longest time between two reports."""
_SHORTEST_LIMIT_S = 3.0
"""The smallest limit: a busy replica may block its loop for this long."""


def watch(name: str, stall_timeout_s: float) -> None:
    """Kills this process if the calling event loop hangs for `stall_timeout_s`, or for 3 s if that
    is longer. `name`: see `Watchdog`."""
    Watchdog(name, max(_SHORTEST_LIMIT_S, stall_timeout_s)).start()


class Watchdog:
    """Reports the progress of an event loop to a process that kills this one after `limit_s`
    without a report. A watchdog that has died is replaced."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name`: the name of this process in the watchdog's message."""
        self._name = name
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        """The write end."""
        self._task: asyncio.Task[None] | None = None
        self._log = StructuredLogger("cluster.watchdog")

    @property
    def pid(self) -> int | None:
        """The pid of the watchdog."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the watchdog. Call this in the loop to watch, after its slow initialization."""
        self._start_process()
        work = exit_on_error_async(self._report_forever, "watchdog")
        self._task = asyncio.create_task(work)

    async def stop(self) -> None:
        """Stops the watchdog."""
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
            except BlockingIOError:  # the watchdog hangs itself, and has enough to read
                pass
            except BrokenPipeError:
                self._replace()
            await asyncio.sleep(min(_LONGEST_PERIOD_S, self._limit_s / _REPORTS))

    def _replace(self) -> None:
        assert self._process is not None
        os.close(self._pipe)
        self._log.warning("the watchdog terminated: replaced", status=self._process.wait())
        self._start_process()

    def _start_process(self) -> None:
        words = (os.getpid(), threading.get_native_id(), self._limit_s, self._name)
        theirs, self._pipe = os.pipe()
        try:
            # Use a new session: a signal to the process group of this process does not stop the
            # watchdog.
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
        """Waits until the watchdog reads the end of the pipe. Kills it if it hangs."""
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
