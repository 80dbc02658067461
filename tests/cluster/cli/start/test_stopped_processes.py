"""Stopped processes are continued while Ray ends, so that they end in order, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swell.cluster.cli.start.ray_leftovers import _GRACE_S, continued, wake
from tests.support.deadlines import HANG_S

SLEEP = "import time; print(flush=True); time.sleep(600)"
STOPS_AGAIN = """
import os, signal
print(flush=True)
while True:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program that has a file of Ray's folder open for writing, or one outside of it."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, folder: str = "ray") -> subprocess.Popen[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        with (tmp_path / folder / "log").open("a") as log:
            command = [sys.executable, "-c", program]
            found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(found)
        assert found.stdout is not None
        found.stdout.readline()
        return found

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=HANG_S)


def stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(process, "T")


def state(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(process: subprocess.Popen[str], *states: str) -> None:
    deadline = time.monotonic() + HANG_S
    while state(process) not in states:
        assert time.monotonic() < deadline, state(process)
        time.sleep(0.01)


def test_a_stopped_process_continues_when_the_shutdown_begins(tmp_path: Path, start: Start) -> None:
    stopped, other = start(SLEEP), start(SLEEP, "ray-other")
    stop(stopped)
    stop(other)
    ending = threading.Event()
    with continued(tmp_path / "ray", ending):
        assert state(stopped) == "T", "the end has not begun"
        ending.set()
        wait_for(stopped, "S", "R")
        stop(stopped)
        wait_for(stopped, "S", "R")
    assert stopped.poll() is None and state(other) == "T"


def test_a_repeatedly_stopped_process_is_killed(tmp_path: Path, start: Start) -> None:
    stubborn, running = start(STOPS_AGAIN), start(SLEEP)
    found_s: dict[int, float] = {}
    for now_s in (0.0, _GRACE_S):
        wait_for(stubborn, "T")
        wake(tmp_path / "ray", found_s, now_s)
    wait_for(stubborn, "T")
    assert found_s == {stubborn.pid: 0.0} and stubborn.poll() is None
    wake(tmp_path / "ray", found_s, _GRACE_S + 1)
    assert stubborn.wait(HANG_S) == -signal.SIGKILL
    assert running.poll() is None


def test_the_watch_ends_with_its_context(tmp_path: Path) -> None:
    before = threading.active_count()
    with continued(tmp_path, threading.Event()):
        pass
    assert threading.active_count() == before
