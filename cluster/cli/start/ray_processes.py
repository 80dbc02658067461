"""Processes that `ray.init` starts on this machine. Ray does not expose them while it starts, so
they are recorded where Ray creates them, in `ray._private.services`.

Each process gets its own session. So a signal to the process group of `swell serve` (Ctrl-C in a
terminal, `timeout`, a shell that exits) only reaches `swell serve`, which stops them in order. If
`swell serve` is killed they still exit with it, because Ray asks the kernel for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

_END_S = 5.0
"""How long a process may take to disappear after SIGKILL."""
_POLL_S = 0.5
_PROBE_S = 1.0
"""How long the GCS may take to accept a connection."""
_NEEDED = ("gcs_server", "raylet")
"""Names of executables without which Ray does not work."""


class RayEnded(Exception):
    """Raised if the node will not start. A RuntimeError would make Ray retry."""


class RayProcesses:
    """The processes of one start."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[Any]] = []
        self.gcs_address = ""
        """`HOST:PORT` of Ray's GCS, once Ray has started."""
        self.is_client_left = False
        """Whether `ray.shutdown` still waits in this process for a Ray that has stopped."""

    @contextlib.contextmanager
    def recorded(self, deadline: Callable[[], float]) -> Iterator[None]:
        """Records the processes that Ray starts within this context, and lets Ray wait for its node
        until `deadline` (on the monotonic clock) instead of 30 s. A Ray without these functions
        starts as usual."""
        from ray._private import services

        changed = {"ConsolePopen": self._popen, "get_node": self._patient(deadline)}
        before = {name: getattr(services, name) for name in changed if hasattr(services, name)}
        for name, original in before.items():
            setattr(services, name, changed[name](original))
        try:
            yield
        finally:
            for name, original in before.items():
                setattr(services, name, original)

    def _popen(self, original: Any) -> Any:
        def start(*arguments: Any, **options: Any) -> Any:
            process = original(*arguments, **{**options, "start_new_session": True})
            self._started.append(process)
            return process

        return start

    def _patient(self, deadline: Callable[[], float]) -> Callable[[object], object]:
        def patient(original: Any) -> Any:
            def get_node(*arguments: Any) -> Any:
                while True:
                    try:
                        return original(*arguments)
                    except RuntimeError as error:  # the node has not registered yet
                        if self.has_lost_one():
                            raise RayEnded("a process of Ray has terminated") from error
                        if time.monotonic() > deadline():
                            raise RayEnded(f"its node did not appear in time: {error}") from error
                    time.sleep(_POLL_S)

            return get_node

        return patient

    def has_lost_one(self) -> bool:
        """Whether a necessary process has exited, or the GCS is about to: after SIGTERM it closes
        its port but lives for another minute."""
        return self._is_gcs_closed() or any(
            process.poll() is not None for process in self._started if _program(process) in _NEEDED
        )

    def _is_gcs_closed(self) -> bool:
        host, _, port = self.gcs_address.rpartition(":")
        if not host:
            return False
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:  # the GCS is slow
            return False

    def end(self) -> None:
        """Kills all processes with their children, after a failed start."""
        for process in self._started:
            with contextlib.suppress(OSError):  # the process has exited, and its group with it
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        self._started.clear()


def _program(process: subprocess.Popen[Any]) -> str:
    """Returns the name of the program that a process runs."""
    args = process.args
    first = args if isinstance(args, str | bytes | os.PathLike) else args[0]
    return os.path.basename(os.fsdecode(first))
