"""Refuses signals of tests that would reach more than one process.

`os.kill(0, SIGSTOP)` suspends the whole process group: all test processes, `make`, and the caller
of `make`, so that nothing is left to report it. A process id of 0 or below is never what a test
means: it comes from a record of a process that was still starting.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

Send = Callable[[int, int], None]


def guard() -> None:
    """Replaces `os.kill` and `os.killpg`. A second call changes nothing."""
    if not isinstance(os.kill, _Guarded):
        os.kill = _Guarded(os.kill, smallest=1)
        os.killpg = _Guarded(os.killpg, smallest=2)


class _Guarded:
    """`smallest`: the smallest accepted number of a process or a group. Group 1 is `init`'s."""

    def __init__(self, send: Send, smallest: int) -> None:
        self._send, self._smallest = send, smallest

    def __call__(self, number: int, signal_number: int) -> None:
        if number < self._smallest or (self._smallest > 1 and number == os.getpgrp()):
            name = signal.Signals(signal_number).name if signal_number else "signal 0"
            raise AssertionError(f"{name} for {number} would reach other processes of this run")
        self._send(number, signal_number)
