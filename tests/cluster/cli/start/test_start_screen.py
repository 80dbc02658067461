"""The start screen shows states at most once a second, and no output of libraries."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.cli.start.start_screen import StatusLine, explanation
from swell.engine.serving.start_timeline import StartPhase
from tests.support.deadlines import HANG_S

PROGRAM = """
import os, sys, time
from pathlib import Path
from swell.cluster.cli.start.start_screen import own_lines_only
from swell.engine.serving.start_timeline import StartTimeline
with own_lines_only(Path(sys.argv[1]), StartTimeline("a phase", time.monotonic)) as screen:
    screen.line("one of ours")
    print("a library, by Python")
    print("a library, to standard error", file=sys.stderr)
    os.write(1, b"C++\\n")
    os.write(2, b"C++ errors\\n")
    screen.line("another one")
print("behind it")
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["a", "b", "c"])), max_size=30))
def test_a_state_is_shown_once_a_second_and_the_newest_counts(
    events: list[tuple[float, str]],
) -> None:
    clock, stream = Clock(), io.StringIO()
    status = StatusLine(stream, is_terminal=False, clock=clock)
    shown_s = list[float]()
    for after_s, state in events:
        clock.now_s += after_s
        status.set(state)
        before = stream.tell()
        status.tick()
        if stream.tell() > before:
            shown_s.append(clock.now_s)
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(shown_s))
    clock.now_s += 1.0
    status.tick()
    lines = stream.getvalue().splitlines()
    if events:
        assert lines[-1].endswith(f" s] {events[-1][1]}")
    assert all(a[-1] != b[-1] for a, b in pairwise(lines)), "said twice"


def test_a_terminal_has_one_line_with_a_spinner_that_moves() -> None:
    clock, stream = Clock(), io.StringIO()
    status = StatusLine(stream, is_terminal=True, clock=clock, width=40)
    status.set("loading weights, 3% of 16.4 GB, and more that does not fit")
    for _ in range(4):
        status.tick()
        clock.now_s += 0.1
    frames = stream.getvalue().split("\r\x1b[K")[1:]
    assert len({frame[0] for frame in frames}) == 4 and "\n" not in stream.getvalue()
    assert all(len(frame) < 40 and "loading weights, 3%" in frame for frame in frames)
    status.clear()
    assert stream.getvalue().endswith("\x1b[K")


def test_a_state_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    status = StatusLine(stream, is_terminal=False, clock=Clock())
    status.set("a\x1b[2J\nb" + "x" * 10_000)
    status.tick()
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line and len(line) < 300


def test_output_of_libraries_is_written_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["one of ours", "another one", "behind it"]
    assert done.stderr == ""
    assert {"a library, by Python", "C++", "C++ errors"} <= set(log.read_text().splitlines())
    assert log.stat().st_mode & 0o077 == 0


def test_a_closed_output_does_not_stop_the_start(tmp_path: Path) -> None:
    """With `swell serve | head -1` the server keeps running."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace('print("behind it")\n', ""), str(tmp_path / "log")],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=HANG_S,
        check=False,
    )
    os.close(writer)
    assert b"Traceback" not in done.stderr


def test_the_phases_of_the_start_and_of_each_engine_are_listed_in_order() -> None:
    phases = [StartPhase("Ray", 3.04), StartPhase("engines", 12.5)]
    measuring = StartPhase("measuring memory", 0.04)
    engines = {
        1: [measuring, StartPhase("loading weights", 1.25)],
        0: [StartPhase("loading libraries", 2.0)],
    }
    assert list(explanation(phases, engines)) == [
        "start: 15.5 s",
        "     3.0 s  Ray",
        "    12.5 s  engines",
        "            engine 0: 2.0 s",
        "                 2.0 s  loading libraries",
        "            engine 1: 1.3 s",
        "                 1.2 s  loading weights",
    ]
