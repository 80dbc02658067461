"""The program of a watchdog: kills the process that started it if that process's event loop hangs.

    python watchdog_process.py PARENT THREAD LIMIT_S NAME

Standard input is a pipe from that loop: a byte is progress, and the end of the pipe means that the
process has exited. Silence is the time without a byte, minus the time that the loop's thread THREAD
waited for a core, so that a busy machine does not kill anything. A late wakeup of this program
counts as two polls at most, so that suspending the whole machine does not kill either. The program
imports only the standard library, so that it starts within milliseconds and uses little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_TURNS = 20
"""The number of polls within the limit."""
_PR_SET_PDEATHSIG = 1
"""Option of `prctl`: a signal for this process when its parent dies."""


def watch(pipe: int, parent: int, thread: int, limit_s: float) -> bool:
    """Waits until the loop has hung for `limit_s`, and returns True; False: its process has
    exited."""
    turn_s = limit_s / _TURNS
    silent_s, waited_s = 0.0, _waited_for_a_core_s(parent, thread)
    while silent_s < limit_s:
        began_s = time.monotonic()
        if select.select([pipe], [], [], turn_s)[0]:
            if not os.read(pipe, 4096):
                return False
            silent_s = 0.0
        else:
            took_s = min(time.monotonic() - began_s, 2 * turn_s)
            before_s, waited_s = waited_s, _waited_for_a_core_s(parent, thread)
            silent_s += max(0.0, took_s - (waited_s - before_s))
    return True


def _waited_for_a_core_s(process: int, thread: int) -> float:
    """Returns how long a thread was runnable without a core, in total; 0 if the system does not
    report it."""
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _end_with_parent(signal_number: int) -> None:
    """Lets the kernel send this signal when the parent dies; 0: none. The signal also reaches a
    watchdog that hangs and would not read the end of the pipe."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)


def main(arguments: list[str]) -> None:
    """Runs the watchdog. Raises ValueError for arguments that do not match the module's usage
    line."""
    (parent, thread), limit_s, name = map(int, arguments[:2]), float(arguments[2]), arguments[3]
    _end_with_parent(signal.SIGKILL)
    if watch(sys.stdin.fileno(), parent, thread, limit_s) and os.getppid() == parent:
        _end_with_parent(0)  # the message is still to be printed
        os.kill(parent, signal.SIGKILL)
        print(
            f"{name} (pid {parent}): its event loop was blocked for {limit_s:g} s "
            "(cluster.stall_timeout_s), so its watchdog killed it; Ray Serve replaces it",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
