"""Processes that a test process has started do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.process import alive
from tests.support import reaper
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

pytestmark = pytest.mark.skipif(not reaper.is_possible(), reason="needs Linux")

SLEEPER = "import time; time.sleep(600)"
STARTS_ANOTHER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}, sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
"""
TEST_PROCESS = f"""
import subprocess, sys, time
from tests.support import reaper
assert reaper.start() is reaper.start()
reaper.run_at_the_end(["touch", sys.argv[2]])
subprocess.run([sys.executable, "-c", {STARTS_ANOTHER!r}, sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_processes_of_a_killed_test_process_are_ended(tmp_path: Path) -> None:
    """The grandchild has its own session, and the child between them has exited, so it is an
    orphan."""
    folder, other = Path(f"/tmp/hosts-reaper-{os.getpid()}"), tmp_path / "ended"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", TEST_PROCESS, str(folder / "session"), str(other)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    assert alive(grandchild) and folder.exists()
    process.send_signal(signal.SIGKILL)
    until(lambda: not alive(grandchild), "it goes on")
    until(lambda: not folder.exists(), "the folder that it named is left")
    until(other.exists, "the command did not run")
    process.communicate()


def test_this_test_process_is_watched() -> None:
    """`tests/conftest.py` started the reaper before the first test."""
    assert "SPT_NOENV" in os.environ
    marked = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        environment = Path(f"/proc/{marked.pid}/environ")
        until(lambda: environment.read_bytes() != b"", "its program is not loaded")
        assert f"SWELL_STARTED_BY={os.getpid()}-".encode() in environment.read_bytes()
    finally:
        marked.kill()
        marked.wait()
