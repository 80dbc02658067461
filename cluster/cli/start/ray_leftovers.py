"""Processes that a Ray of ours leaves behind, and their end.

Ray ends its processes by asking them, and a worker ends when its node does. A process that is
stopped, that starts while Ray ends, or that a killed worker has started itself, is none that
listens. Each of them writes to a log in Ray's folder, or has inherited such a file, and that is how
they are found: also those whose parents have ended. A reader of these logs is nobody's process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.05
_KILL_S = 5.0
"""How long the kernel may take to end what was killed."""


def end_all(folder: Path, grace_s: float) -> list[int]:
    """Wait `grace_s` until no process of this Ray is left, and kill what is left then. Returns its
    pids, of which none is alive unless the kernel cannot end it."""
    _wait_until_gone(folder, grace_s)
    left = writers(folder)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        _wait_until_gone(folder, _KILL_S)
    return left


def writers(folder: Path) -> list[int]:
    """Processes with a file below the folder open for writing, without this one. Empty where the
    system has no `/proc`."""
    start, me = f"{folder}/", os.getpid()
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != me and _writes(pid, start)]


def _writes(pid: int, start: str) -> bool:
    process = f"/proc/{pid}"
    try:
        for file in os.listdir(f"{process}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                is_below = os.readlink(f"{process}/fd/{file}").startswith(start)
                if is_below and _is_writable(f"{process}/fdinfo/{file}"):
                    return True
    except OSError:  # it has ended, or belongs to somebody else
        return False
    return False


def _is_writable(fdinfo: str) -> bool:
    """By the line `flags:` of `proc(5)`, which is octal."""
    words = Path(fdinfo).read_text().split()
    return int(words[words.index("flags:") + 1], 8) & os.O_ACCMODE != os.O_RDONLY


def _wait_until_gone(folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while writers(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
