"""Ends the processes of a Ray of ours that do not exit: continues those that are stopped (SIGSTOP)
while Ray shuts down, and kills those that are left afterwards.

Ray asks its processes to exit, and a worker exits with its node. This does not reach a process that
hangs, that starts while Ray stops, or that was started by a killed worker. All of them write to a
log in Ray's folder or have inherited such a file, which is how they are found even if their parents
have exited. Processes that only read these logs do not count.

A stopped process does not answer and does not exit, so that each step of the shutdown would wait
for its full time limit. Therefore the shutdown continues stopped processes, as service managers do,
and everything exits in order. It kills a process that is stopped repeatedly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.05
_KILL_S = 5.0
"""How long the kernel may take to remove killed processes."""
_STOPPED_POLL_S = 0.5
_GRACE_S = 5.0
"""How long a process may be stopped repeatedly, from the first check that found it stopped."""


def end_all(folder: Path, grace_s: float) -> list[int]:
    """Waits up to `grace_s` until no process of this Ray is left, then kills the rest. Returns
    their pids; all are dead unless the kernel cannot kill them."""
    _wait_until_gone(folder, grace_s)
    left = writers(folder)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        _wait_until_gone(folder, _KILL_S)
    return left


def writers(folder: Path) -> list[int]:
    """Returns other processes that have a file below the folder open for writing. Empty without
    `/proc`."""
    me = os.getpid()
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != me and writes_below(pid, folder)]


def writes_below(pid: int, folder: Path) -> bool:
    """Whether the process has a file below the folder open for writing."""
    process, start = f"/proc/{pid}", f"{folder}/"
    try:
        for file in os.listdir(f"{process}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                is_below = os.readlink(f"{process}/fd/{file}").startswith(start)
                if is_below and _is_writable(f"{process}/fdinfo/{file}"):
                    return True
    except OSError:  # the process has exited, or belongs to another user
        return False
    return False


def _is_writable(fdinfo: str) -> bool:
    """Whether a file is open for writing, from the octal line `flags:` of `proc(5)`."""
    words = Path(fdinfo).read_text().split()
    return int(words[words.index("flags:") + 1], 8) & os.O_ACCMODE != os.O_RDONLY


def _wait_until_gone(folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while writers(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


@contextlib.contextmanager
def continued(folder: Path, ending: threading.Event) -> Iterator[None]:
    """Continues stopped processes that write below the folder, from the time that `ending` is set
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
        done.wait(_STOPPED_POLL_S)


def wake(folder: Path, found_s: dict[int, float], now_s: float) -> None:
    """Continues each stopped process that writes below the folder, or kills it if it was first
    found more than a grace ago. `found_s`: pid -> when it was first found, which this function
    keeps."""
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
