"""Kills every process that this one has started after this one has ended for any reason.

    test process ---+--> clusters, Ray, servers: their child processes inherit the mark too
                    +--> reaper: waits until the test process ends, then kills marked processes

A test stops its clusters in order. A killed test process cannot, and `swell serve`, which has its
own session, would keep running. The reaper is not marked and also has its own session, so that no
signal for the others reaches it. It finds processes by their environment in `/proc`. There is no
reaper on a system without `/proc` or without `pidfd_open`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MARK = "SWELL_STARTED_BY"
_GRACE_S = 1.0
"""Seconds in which processes may exit by themselves after the test process."""
_LIMIT_S = 30.0
_POLL_S = 0.1
_PIPE_BYTES = 65536
_FOLDER = re.compile(r"/tmp/(?:swell|hosts)-[\w-]+")
"""Matches a Ray folder in the command line of a Ray process."""


def is_possible() -> bool:
    return hasattr(os, "pidfd_open") and Path("/proc/self/environ").exists()


@functools.cache
def start() -> subprocess.Popen[bytes] | None:
    """Starts the reaper of this process, and marks all processes that this one starts from now on.
    Returns None if this system is not supported. Further calls change nothing."""
    if not is_possible():
        return None
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    us = os.pidfd_open(os.getpid())
    reaper = subprocess.Popen(
        [sys.executable, "-S", __file__, str(us), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != _MARK},
        pass_fds=[us],
        start_new_session=True,
    )
    os.close(us)
    # Ray renames its processes with setproctitle, which wipes the environment unless SPT_NOENV is
    # set.
    os.environ.update({_MARK: mark, "SPT_NOENV": "1"})
    return reaper


def run_at_the_end(command: Sequence[str]) -> None:
    """Registers a command to run after the processes have ended. Commands run in order, and may
    fail."""
    reaper = start()
    if reaper is not None and reaper.stdin is not None:
        reaper.stdin.write(json.dumps(list(command)).encode() + b"\n")
        reaper.stdin.flush()


def _reap(test_process: int, mark: str) -> None:
    select.select([test_process], [], [])
    grace, limit = time.monotonic() + _GRACE_S, time.monotonic() + _LIMIT_S
    folders: set[str] = set()
    num_looks_without = 0
    while num_looks_without < 2 and time.monotonic() < limit:
        pids = list(_marked(mark))
        num_looks_without = 0 if pids else num_looks_without + 1
        if time.monotonic() > grace:
            folders.update(name for pid in pids for name in _folders(pid))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.set_blocking(0, False)
    with contextlib.suppress(BlockingIOError):
        for line in os.read(0, _PIPE_BYTES).splitlines():
            subprocess.run(json.loads(line), check=False)


def _marked(mark: str) -> Iterator[int]:
    """Yields the running marked processes. Misses a process that is just loading its program,
    because its environment is empty, like that of a zombie."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _folders(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return _FOLDER.findall(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    return []


if __name__ == "__main__":
    _reap(int(sys.argv[1]), sys.argv[2])
