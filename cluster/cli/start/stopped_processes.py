"""Processes of our Ray that are stopped (SIGSTOP) while Ray shuts down.

A stopped process does not answer and does not exit, so that each step of the shutdown would wait
for its full time limit. Therefore the shutdown continues stopped processes, as service managers do,
and everything exits in order. It kills a process that is stopped again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from swell.cluster.cli.start.ray_leftovers import writes_below

_GRACE_S = 5.0
"""How long a process may be stopped again and again, from the first check that found it stopped."""
_POLL_S = 0.5


@contextlib.contextmanager
def continued(folder: Path, ending: threading.Event) -> Iterator[None]:
    """Continue stopped processes that write below the folder, from the time that `ending` is set
    until this context exits. Sets `ending` on exit."""
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(folder, ending, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        ending.set()
        watch.join()


def _watch(folder: Path, ending: threading.Event, done: threading.Event) -> None:
    ending.wait()
    found_s: dict[int, float] = {}
    while not done.is_set():
        wake(folder, found_s, time.monotonic())
        done.wait(_POLL_S)


def wake(folder: Path, found_s: dict[int, float], now_s: float) -> None:
    """Continue each stopped process that writes below the folder, or kill it if it was first found
    more than a grace ago. `found_s`: pid -> when it was first found, which this function keeps."""
    for pid in _stopped():
        if pid == os.getpid() or not writes_below(pid, folder):
            continue
        is_over = now_s - found_s.setdefault(pid, now_s) > _GRACE_S
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(pid, signal.SIGKILL if is_over else signal.SIGCONT)


def _stopped() -> Iterator[int]:
    """Pids of all stopped processes, without those that a debugger holds. Empty without
    `/proc`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                yield int(process.name)
