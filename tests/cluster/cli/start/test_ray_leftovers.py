"""Every process that our Ray leaves running is killed, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster.cli.start.ray_leftovers import end_all, writers
from tests.support.deadlines import HANG_S

ORPHAN = """
import subprocess, sys
words = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
"""
"""Starts a process that inherits its standard error, and exits before that process does."""
WAITS_FOR = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "session" / "logs" / "worker.err"
    path.parent.mkdir(parents=True)
    path.touch()
    yield path
    for pid in writers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def start(*command: str, log: Path, mode: str = "a") -> subprocess.Popen[str]:
    with log.open(mode) as file:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=file,
            stdout=pipe,
            stderr=file if mode == "a" else pipe,
            text=True,
        )


def test_a_terminated_ray_leaves_no_process(tmp_path: Path) -> None:
    assert writers(tmp_path) == [] == end_all(tmp_path, HANG_S)


def test_a_stopped_process_and_the_child_of_a_killed_one_are_killed(
    tmp_path: Path, log: Path
) -> None:
    stopped = start("-c", "import time; time.sleep(600)", log=log)
    os.kill(stopped.pid, signal.SIGSTOP)
    parent = start("-c", ORPHAN, log=log)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    parent.communicate(timeout=HANG_S)
    assert set(end_all(tmp_path, 0.1)) == {stopped.pid, orphan}
    assert stopped.wait(timeout=HANG_S) == -signal.SIGKILL
    assert writers(tmp_path) == []


def test_processes_that_exit_by_themselves_are_waited_for(tmp_path: Path, log: Path) -> None:
    end = tmp_path / "end"
    ending = start("-c", WAITS_FOR, str(end), log=log)
    assert writers(tmp_path) == [ending.pid]
    end.touch()
    assert end_all(tmp_path, HANG_S) == []
    assert ending.wait(timeout=HANG_S) == 0


def test_a_log_reader_and_this_process_are_not_leftovers(tmp_path: Path, log: Path) -> None:
    reader = start("-c", "import sys; print(1, flush=True); input(sys.argv)", log=log, mode="r")
    other = start("-c", "import time; time.sleep(600)", log=_log_outside(tmp_path))
    with log.open("a"):
        assert end_all(tmp_path, 0.0) == []
    assert other.poll() is None
    for process in (reader, other):
        process.kill()
        process.communicate(timeout=HANG_S)


def _log_outside(folder: Path) -> Path:
    """Returns a file in another folder whose path starts with this folder's name."""
    path = folder.with_name(f"{folder.name}-other")
    path.mkdir()
    return path / "log"


def test_a_process_that_starts_during_the_search_is_found(tmp_path: Path, log: Path) -> None:
    """A process that starts between two scans is found by the later one, and `end_all` kills it."""
    deadline = time.monotonic() + HANG_S
    late = start("-c", "import time; time.sleep(600)", log=log)
    while not writers(tmp_path):
        assert time.monotonic() < deadline
    assert end_all(tmp_path, 0.0) == [late.pid]
    late.wait(timeout=HANG_S)
