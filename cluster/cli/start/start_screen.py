"""Output of `swell serve`: only its own lines. Output of libraries to the standard streams of the
process goes to a file.

On a terminal the newest state is one line with a spinner; elsewhere each changed state is a new
line. A state is shown at most once per second, and only the newest one counts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from swell.cluster.cli.console import plain
from swell.engine.serving.start_timeline import StartPhase, StartTimeline

_MIN_INTERVAL_S = 1.0
_SPIN_S = 0.1
_SPINNER = "|/-\\"
_CLEAR = "\r\x1b[K"
_MAX_STATE = 200
"""Characters of a state that are shown."""
_INDENT = " " * 12
_SHOWN_S = 0.05
"""The shortest phase that `explanation` lists."""


class StatusLine:
    """Displays the state. `tick` may be called at any rate."""

    def __init__(
        self, stream: TextIO, *, is_terminal: bool, clock: Callable[[], float], width: int = 80
    ) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._clock = clock
        self._width = width
        self._began_s = clock()
        self._state = self._shown = ""
        self._shown_s = self._began_s - _MIN_INTERVAL_S
        self._turn = 0

    def set(self, state: str) -> None:
        self._state = plain(state)[:_MAX_STATE]

    def tick(self) -> None:
        """Shows the newest state if it is due."""
        now_s = self._clock()
        if self._state != self._shown and now_s - self._shown_s >= _MIN_INTERVAL_S:
            self._shown, self._shown_s = self._state, now_s
            if not self._is_terminal:
                self._stream.write(f"[{now_s - self._began_s:5.1f} s] {self._shown}\n")
                self._stream.flush()
        if self._is_terminal and self._shown:
            self._turn += 1
            spinner = _SPINNER[self._turn % len(_SPINNER)]
            text = f"{spinner} [{now_s - self._began_s:5.1f} s] {self._shown}"
            self._stream.write(_CLEAR + text[: self._width - 1])
            self._stream.flush()

    def clear(self) -> None:
        """Removes the state, before another line and at the end."""
        self._state = ""
        if self._is_terminal and self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
        self._shown = ""


class StartScreen:
    """Writes lines to standard output and the state to standard error. A thread updates the state,
    because Ray and Serve block their caller."""

    def __init__(self, out: TextIO, err: TextIO, timeline: StartTimeline) -> None:
        """`timeline`: the phases of the start, which callers enter."""
        self.timeline = timeline
        self._out = out
        is_terminal = err.isatty()
        width = os.get_terminal_size(err.fileno()).columns if is_terminal else 80
        self._status = StatusLine(
            err, is_terminal=is_terminal, clock=time.monotonic, width=max(20, width)
        )
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start screen", daemon=True)
        self._thread.start()

    def state(self, text: str) -> None:
        """Sets the reason of the wait."""
        with self._lock:
            self._status.set(text)

    def line(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader of the output has closed it
            self._status.clear()
            self._out.write(text + "\n")
            self._out.flush()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        with self._lock, contextlib.suppress(OSError):
            self._status.clear()

    def _run(self) -> None:
        while not self._stop.wait(_SPIN_S):
            with self._lock, contextlib.suppress(OSError):
                self._status.tick()


@contextlib.contextmanager
def own_lines_only(log: Path, timeline: StartTimeline) -> Iterator[StartScreen]:
    """Appends all other output to file descriptors 1 and 2 to `log`, including that of Ray's C++
    code."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    out, err = (os.fdopen(os.dup(number), "w", errors="replace") for number in kept)
    screen = StartScreen(out, err, timeline)
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield screen
    finally:
        screen.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(target)


def explanation(
    phases: Sequence[StartPhase], engines: Mapping[int, Sequence[StartPhase]]
) -> Iterator[str]:
    """Yields the lines of `swell serve --explain-start`. `phases`: those of the whole start, one
    after the other; `engines`: those of each engine, by rank. Engines start at the same time.
    Phases that would be shown as 0.0 s are left out."""
    yield f"start: {_total(phases)}"
    yield from _lines(phases)
    for rank, own in sorted(engines.items()):
        yield f"{_INDENT}engine {rank}: {_total(own)}"
        yield from (_INDENT + line for line in _lines(own))


def _total(phases: Sequence[StartPhase]) -> str:
    return f"{sum(each.seconds for each in phases):.1f} s"


def _lines(phases: Sequence[StartPhase]) -> Iterator[str]:
    return (f"{each.seconds:8.1f} s  {each.phase}" for each in phases if each.seconds >= _SHOWN_S)
