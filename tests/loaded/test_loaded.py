"""The processes of a loaded run stall at random, and its busy processes end with it."""

from __future__ import annotations

import subprocess
import sys

from tests.loaded.__main__ import BUSY, STALLS
from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT

THREADS = """
import os, threading
names = [thread.name for thread in threading.enumerate()]
child = os.fork()
if child:
    os.waitpid(child, 0)
print(names + [thread.name for thread in threading.enumerate()])
"""
STARTER = f"""
import os, subprocess, sys
busy = subprocess.Popen([sys.executable, "-S", "-c", {BUSY!r}, str(os.getpid())])
print(busy.pid, flush=True)
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    return done.stdout


def test_processes_and_their_forks_stall() -> None:
    names = ["MainThread", "stalls"]
    assert sorted(run(THREADS, PYTHONPATH=str(STALLS)).splitlines()) == [str(names * 2)] * 2


def test_a_busy_process_ends_with_the_process_that_started_it() -> None:
    assert run(STARTER).strip().isdigit(), "its output ends only when the busy process has ended"
