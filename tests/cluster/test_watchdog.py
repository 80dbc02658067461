"""A process whose event loop hangs is killed by its watchdog. Other processes are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.cluster import watchdog_process
from tests.support.deadlines import HANG_S

LIMIT_S = 1.0
PROGRAM = """
import asyncio, sys, time
from swell.cluster.watchdog import Watchdog

async def main():
    dog = Watchdog("the test", float(sys.argv[1]))
    dog.start()
    while True:
        print(dog.pid, flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        if line == "hang\\n":
            time.sleep(600)
        if line == "stop\\n":
            await dog.stop()
            print("stopped", flush=True)
            return

asyncio.run(main())
"""


class Watched:
    """A process with an event loop and a watchdog."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.dog = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def request(self, word: str) -> str:
        """Sends a word and returns the reply: the pid of the current watchdog, or another
        answer."""
        self.send(word)
        return self._line()

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def ended_by(self) -> int:
        return -self.process.wait(timeout=HANG_S)

    def close(self) -> str:
        """Kills the process. Returns what it and its watchdog wrote to standard error."""
        self.process.kill()
        _, errors = self.process.communicate(timeout=HANG_S)
        return errors


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()
    until_gone(made.dog)


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.02)


def until_it_watches(pid: int) -> None:
    """Waits until the process blocks in poll."""
    deadline = time.monotonic() + HANG_S
    while "poll" not in Path(f"/proc/{pid}/wchan").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_process_that_is_stopped_is_killed(watched: Watched) -> None:
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert watched.ended_by() == signal.SIGKILL
    message = watched.close()
    assert f"the test (pid {watched.process.pid})" in message
    assert "1 s (cluster.stall_timeout_s)" in message


def test_a_process_with_a_hanging_loop_is_killed(watched: Watched) -> None:
    watched.send("hang")
    assert watched.ended_by() == signal.SIGKILL


def test_a_short_stop_and_a_stop_of_both_processes_are_harmless() -> None:
    watched = Watched(limit_s=HANG_S)
    for pids in ([watched.process.pid], [watched.process.pid, watched.dog], [watched.dog]):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert watched.request("on") == str(watched.dog)
    watched.close()
    until_gone(watched.dog)


def test_a_terminated_watchdog_is_replaced(watched: Watched) -> None:
    os.kill(watched.dog, signal.SIGKILL)
    deadline = time.monotonic() + HANG_S
    while (successor := int(watched.request("on"))) == watched.dog:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert watched.ended_by() == signal.SIGKILL
    until_gone(successor)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_watchdog_ends_with_its_process(watched: Watched, stopped: bool) -> None:
    if stopped:
        until_it_watches(watched.dog)
        os.kill(watched.dog, signal.SIGSTOP)
    watched.process.kill()
    watched.ended_by()
    until_gone(watched.dog)


def test_a_watchdog_stops_on_request(watched: Watched) -> None:
    assert watched.request("stop") == "stopped"
    assert watched.process.wait(timeout=HANG_S) == 0
    assert not is_alive(watched.dog)


# ---------------------------------------------------------------- silence


def silence_of(monkeypatch: pytest.MonkeyPatch, took_s: float, waited_s: float) -> float:
    """Returns the clock time in seconds after which a loop without progress counts as hanging for 1
    s. Each poll takes `took_s`, and its thread waits for a core during `waited_s` of that time.
    Returns at least 100 if that does not happen."""
    clock = [0.0]
    reading, writing = os.pipe()

    def select(pipes: list[int], _writing: object, _errors: object, _limit_s: float) -> object:
        clock[0] += took_s
        if clock[0] < 100:
            return [], [], []
        return pipes, [], []  # the pipe is closed

    monkeypatch.setattr(watchdog_process.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog_process.select, "select", select)
    monkeypatch.setattr(
        watchdog_process, "_waited_for_a_core_s", lambda *_: clock[0] * waited_s / took_s
    )
    os.close(writing)
    stands_still = watchdog_process.watch(reading, 1, 1, 1.0)
    os.close(reading)
    assert stands_still == (clock[0] < 100)
    return clock[0]


def test_silence_counts_only_time_in_which_the_loop_could_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert silence_of(monkeypatch, 0.05, 0.0) == pytest.approx(1.0, abs=0.1)
    assert silence_of(monkeypatch, 0.05, 0.025) == pytest.approx(2.0, abs=0.1), (
        "half of it had no core"
    )
    assert silence_of(monkeypatch, 0.05, 0.05) >= 100, "it never had a core"
    assert silence_of(monkeypatch, 1.0, 0.0) == pytest.approx(10.0, abs=1), "looks that are late"


def test_the_time_without_a_core_is_read_from_the_kernel() -> None:
    known = watchdog_process._waited_for_a_core_s(os.getpid(), threading.get_native_id())
    assert known >= 0
    assert watchdog_process._waited_for_a_core_s(os.getpid(), 0) == 0.0
