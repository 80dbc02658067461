"""Signals that would reach all test processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


def test_a_signal_for_several_processes_is_refused() -> None:
    for pid in (0, -1, -os.getpgrp()):
        with pytest.raises(AssertionError, match=f"SIGCONT for {pid}"):
            os.kill(pid, signal.SIGCONT)


def test_a_signal_for_the_own_group_is_refused() -> None:
    for group in (0, 1, os.getpgrp()):
        with pytest.raises(AssertionError, match=f"SIGCONT for {group}"):
            os.killpg(group, signal.SIGCONT)


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_another_process_and_its_group_get_the_signal(send) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True)
    try:
        send(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
