"""Ends every process that this one has started, once this one is gone, for whatever reason.

    test process ---+--> clusters, Ray, servers: what these start inherits the mark too
                    +--> reaper: waits for the end of the test process, then kills what is marked

A test ends its clusters in order. A test process that is killed cannot, and `swell serve`, which
has a session of its own, would go on. The reaper is not marked and has a session of its own too, so
that no signal for the others reaches it. Processes are found by their environment in `/proc`:
without it, and without `pidfd_open`, there is no reaper.
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
"""The time in which processes may end by themselves with the test process."""
_LIMIT_S = 30.0
_POLL_S = 0.1
_PIPE_BYTES = 65536
_FOLDER = re.compile(r"/tmp/(?:swell|hosts)-[\w-]+")
"""A folder of Ray's, in the command line of a process of Ray's."""


def is_possible() -> bool:
    return hasattr(os, "pidfd_open") and Path("/proc/self/environ").exists()


@functools.cache
def start() -> subprocess.Popen[bytes] | None:
    """Start the reaper of this process, and mark what this process starts from now on; None: not on
    this system. Further calls change nothing."""
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
    # Ray names its processes by setproctitle, which else wipes the environment.
    os.environ.update({_MARK: mark, "SPT_NOENV": "1"})
    return reaper


def run_at_the_end(command: Sequence[str]) -> None:
    """Also run this, after the processes have ended. Commands run in their order, and may fail."""
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
    """Marked processes that are running, except one that is just loading its program: its
    environment is empty, like that of a zombie."""
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
