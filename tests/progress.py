"""Reports how far a run of the tests is, and ends one that does not get any further.

A quiet report (`pytest -q`) shows neither the time nor the running tests. So a run that is stopped
after an hour would not show whether the machine was slow or a test hung.

    every 5 minutes      a line: time, number of tests, load, memory, the tests that run longest
    20 minutes' silence  the state of each test process; then they are killed, which ends the run

Without several test processes nothing is killed, because a test may be debugged.

A test that hangs fails after 15 minutes by itself (`timeout` in `pyproject.toml`), unless its
process is suspended or cannot run its interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPORT_S = 300.0
SILENCE_S = 1200.0
"""The longest silence of all test processes: longer than the time limits of a test."""
_POLL_S = 5.0
_GRACE_S = 60.0
"""How long the run has to end after its test processes have been killed."""
_SHOWN = 4
"""How many running tests a line names."""


class Progress:
    """Counts the tests of all test processes. Its hooks run in the process that reports."""

    def __init__(
        self, config: pytest.Config, report_s: float = REPORT_S, silence_s: float = SILENCE_S
    ) -> None:
        self._plugins = config.pluginmanager
        self._terminal: Any = self._plugins.getplugin("terminalreporter")
        self._is_shared = getattr(config.option, "dist", "no") != "no"
        self._report_s, self._silence_s = report_s, silence_s
        self._running: dict[str, float] = {}
        self._num_finished = 0
        self.begin = self._last_report = time.monotonic()
        self._has_event = False
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begins to report, and to count, in a thread."""
        self._plugins.register(self, "progress")
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def pytest_sessionfinish(self) -> None:
        self._is_over.set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()
        self._has_event = True

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._num_finished += 1
        self._has_event = True

    def _watch(self) -> None:
        poll_s = min(_POLL_S, self._silence_s / 4)
        num_silent = 0  # counted, because the whole run may be suspended for a while
        while not self._is_over.wait(poll_s):
            now = time.monotonic()
            num_silent = 0 if self._has_event else num_silent + 1
            self._has_event = False
            if now - self._last_report >= self._report_s:
                self._last_report = now
                self._write(self.line(now))
            if num_silent * poll_s >= self._silence_s and self._num_finished and self._is_shared:
                self._write(f"No test has begun or ended for {self._silence_s:.0f} s.")
                self._write(self.line(now), *kill_test_processes())
                if not self._is_over.wait(_GRACE_S):
                    os._exit(1)

    def _write(self, *lines: str) -> None:
        self._terminal.ensure_newline()
        for line in lines:
            self._terminal.write_line(line)
        self._terminal.flush()

    def line(self, now: float) -> str:
        """Returns the state of the run at a monotonic time."""
        longest = sorted(self._running.items(), key=lambda test: test[1])[:_SHOWN]
        tests = "; ".join(f"{name} for {now - begin:.0f} s" for name, begin in longest)
        return (
            f"[{(now - self.begin) / 60:.0f} min, {self._num_finished} tests, "
            f"load {os.getloadavg()[0]:.1f}{_free_memory()}] {tests or 'no test'}"
        )


def _free_memory() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return f", {int(line.split()[1]) / 2**20:.1f} GiB free"
    return ""


def kill_test_processes() -> Iterator[str]:
    """Kills the test processes that this process has started. Yields what each of them did."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines()
            )
            if int(status["PPid"]) != os.getpid() or b"-c" not in command[1:4]:
                continue
            waits = (folder / "wchan").read_text() or "-"
            yield f"killed {folder.name}: {status['State']}, in the kernel: {waits}"
            os.kill(int(folder.name), signal.SIGKILL)


def start(config: pytest.Config) -> None:
    """Reports the progress of this run, unless this is one of its test processes."""
    if not hasattr(config, "workerinput"):
        Progress(config).start()
