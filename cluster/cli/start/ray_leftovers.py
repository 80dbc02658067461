"""Finds and kills processes that a Ray of ours has left.

Ray asks its processes to exit, and a worker exits with its node. This does not reach a process that
hangs, that starts while Ray stops, or that was started by a killed worker. All of them write to a
log in Ray's folder or have inherited such a file, which is how they are found even if their parents
have exited. Processes that only read these logs do not count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.05
_KILL_S = 5.0
"""How long the kernel may take to remove killed processes."""


def end_all(folder: Path, grace_s: float) -> list[int]:
    """Wait up to `grace_s` until no process of this Ray is left, then kill the rest. Returns their
    pids; all are dead unless the kernel cannot kill them."""
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
