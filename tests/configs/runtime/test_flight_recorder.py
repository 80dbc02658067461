"""Another process reads the record of a process that hangs, for each way to hang."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swell.configs.runtime import flight_recorder
from swell.configs.runtime.flight_recorder import FlightRecorder, describe_group, group_of
from tests.support.deadlines import HANG_S

PROGRAM = """
import ctypes, sys, threading, time
from swell.configs.runtime.flight_recorder import recorder

def hang_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hang_with_the_interpreter_lock():
    while True:
        ctypes.PyDLL(None).sleep(1000)

def run():
    time.sleep(1000)

recorder().publish(sys.argv[1], sys.argv[2])
recorder().note("plan 1")
recorder().note("plan 2")
counts = recorder().counter("tensor")
counts[0] += 3
counts[1] += 2
print("ready", flush=True)
globals()[sys.argv[3]]()
"""
WAYS = ("hang_in_a_lock", "hang_with_the_interpreter_lock", "run")


@contextmanager
def recording(group: str, name: str, way: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, group, name, way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def group() -> str:
    return f"test {os.getpid()} {time.monotonic()}"


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """Nothing that runs is silent because the machine is busy."""
    monkeypatch.setattr(flight_recorder, "_ANSWER_S", HANG_S)


def until(condition) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["hang_in_a_lock", "run"])
def test_a_process_that_can_run_threads_writes_its_stacks(group, way) -> None:
    with recording(group, "worker 0", way) as process:
        assert group_of(process.pid) == group
        text = describe_group(group, [process.pid] if way != "run" else [])
    state = "hangs" if way != "run" else "runs"
    assert f"== worker 0 (pid {process.pid}), {state}" in text
    assert "tensor: 3 started, 2 finished" in text
    assert re.search(r"\d\d:\d\d:\d\d\.\d{3} plan 1\n\d\d:\d\d:\d\d\.\d{3} plan 2\n", text)
    assert "Thread MainThread (most recent call first):" in text
    assert re.search(rf'File "<string>", line \d+ in {way}\n', text)
    assert "state S" in text, "the kernel's view"


def test_a_process_that_holds_the_interpreter_lock_writes_its_stacks(group, monkeypatch) -> None:
    monkeypatch.setattr(flight_recorder, "_ANSWER_S", 2.0)  # it never answers the first question
    with recording(group, "worker 0", "hang_with_the_interpreter_lock") as process:
        until(lambda: "S" in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2])
        found = ""
        while "in hang_with_the_interpreter_lock" not in found:  # within the test's timeout
            found = describe_group(group, [process.pid])
        assert "tensor: 3 started, 2 finished" in found
        assert process.poll() is None


def test_a_suspended_process_is_described_without_its_help(group, monkeypatch) -> None:
    monkeypatch.setattr(flight_recorder, "_ANSWER_S", 0.1)
    with recording(group, "worker 1", "run") as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text())
        text = describe_group(group, [process.pid])
    assert "plan 2" in text and "tensor: 3 started, 2 finished" in text
    assert "state T" in text and "the process did not write them" in text


def test_a_process_that_is_not_about_to_be_killed_gets_no_signal(group, monkeypatch) -> None:
    """The handler reads stacks that other threads change meanwhile. The process still answers just
    before it hangs."""
    monkeypatch.setattr(flight_recorder, "_ANSWER_S", 0.1)
    silent = flight_recorder._Process
    monkeypatch.setattr(silent, "signal", lambda process: pytest.fail("it runs"))
    with recording(group, "worker 0", "hang_with_the_interpreter_lock"):
        until(lambda: "the process did not write them" in describe_group(group, []))


def test_all_processes_of_a_group_are_described_and_no_others(group) -> None:
    with (
        recording(group, "worker 1", "run") as second,
        recording(group, "worker 0", "run") as first,
        recording(f"{group} other", "worker 0", "run") as other,
    ):
        text = describe_group(group, [second.pid])
    assert re.findall(r"^== (.*)$", text, re.MULTILINE) == [
        f"worker 0 (pid {first.pid}), runs",
        f"worker 1 (pid {second.pid}), hangs",
    ]
    assert str(other.pid) not in text
    assert describe_group(group, []) == "", "they have exited"
    assert group_of(first.pid) == ""


def test_connections_are_described() -> None:
    """The connections of this process, which reads itself: what was sent and not read is seen."""
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with socket.socket(family) as server:
            try:
                server.bind((host, 0))
            except OSError:
                continue  # no IPv6
            server.listen()
            with socket.create_connection(server.getsockname()[:2]) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x" * 77)
                    here, there = client.getsockname()[1], server.getsockname()[1]
                    expected = f"{host}:{there} -> {host}:{here}: established, 0 bytes not"
                    until(
                        lambda expected=expected: any(
                            line.startswith(expected) and "77 not read" in line
                            for line in flight_recorder._connections(os.getpid())
                        )
                    )


def test_the_newest_events_and_the_first_counters_stay() -> None:
    own = FlightRecorder()
    for number in range(200):
        own.note(f"event {number} " + "é" * 300)
    counters = [own.counter(f"counter {number}") for number in range(40)]
    for counts in counters:
        counts[0] += 1
    read = flight_recorder._Process(0, "", "", bytes(own._memory), Path(), Path())
    events = list(read.events())
    assert len(events) == 128
    assert " event 72 " in events[0] and " event 199 " in events[-1]
    assert len(list(read.counters())) == 24


def test_events_of_many_threads_are_whole() -> None:
    own = FlightRecorder()

    def write(letter: str) -> None:
        for _ in range(500):
            own.note(letter * 100)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = flight_recorder._Process(0, "", "", bytes(own._memory), Path(), Path())
    events = [event.partition(" ")[2] for event in read.events()]
    assert len(events) == 128 and {len(set(event)) for event in events} == {1}


def test_files_that_are_closed_meanwhile_hide_no_process(group, monkeypatch) -> None:
    original = os.readlink

    def readlink(path: Path) -> str:
        if int(path.name) < 3:
            raise FileNotFoundError(path)
        return original(path)

    with recording(group, "worker 0", "run") as process:
        monkeypatch.setattr(os, "readlink", readlink)
        assert group_of(process.pid) == group


def test_a_recorder_without_memory_for_stacks_does_not_end_its_process(monkeypatch) -> None:
    own = FlightRecorder()
    asked = iter([b".", b".", b""])
    monkeypatch.setattr(flight_recorder.os, "read", lambda *_: next(asked))
    own._answer_forever()  # there is no file for stacks yet
    assert next(asked, None) is None
