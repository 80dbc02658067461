"""Programs in subprocesses: started, called, and terminated with all their descendants."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swell.cluster.cli.child_process import adopt_orphans, descendants
from tests.benchmarks.machine import ROOT
from tests.faults.process import enable_sigint

START_S = 280.0
"""The limit for a start; a peer may compile something."""
ANSWER_S = 280.0
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment of every contender, so that none uses the network."""
_EXIT_S = 5.0
_STOP_S = 60.0
_VANISH_S = 3.0
_LAST_LINES = 12
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ContenderFailed(RuntimeError):
    """A program that exited or did not answer in time, with the last lines of its log."""


class Child:
    """One program and its descendants. Output that is not a message goes to a log in `folder`.

    The program has a session of its own: Ctrl-C in a terminal reaches only this process, which
    terminates the program cleanly.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, has_stdin: bool) -> None:
        """`has_stdin`: the program exchanges lines with this process; otherwise its output goes to
        the log, like its errors."""
        self.name = name
        self._has_stdin = has_stdin
        self._command = list(command)
        self._log = folder / f"{name.replace(' ', '-')}.log"
        self._env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(_python_path())}
        if command[0] != sys.executable:  # our path is useless for other interpreters
            del self._env["PYTHONPATH"]
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self) -> None:
        adopt_orphans()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._has_stdin else log,
                stderr=log,
                env=self._env,
                start_new_session=True,
                preexec_fn=enable_sigint,
            )

    @property
    def pids(self) -> list[int]:
        """Returns the pids of the child and its descendants, including those with an exited
        parent."""
        if self._process is None:
            return []
        own = self._process.pid
        ours = [pid for pid in descendants(os.getpid()) if _session(pid) == own]
        return list({*ours, *descendants(own)})

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, **facts: Any) -> None:
        """Writes one JSON line to the program. Raises ContenderFailed."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(facts) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("ended") from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Returns the next JSON line that the program writes. Raises ContenderFailed."""
        line = self.line(limit_s)
        try:
            return dict(msgspec.json.decode(line))
        except msgspec.DecodeError:
            raise self.failure(f"wrote {line[:80]!r}, not JSON,") from None

    def call(self, limit_s: float = ANSWER_S, **facts: Any) -> dict[str, Any]:
        """Sends a line and returns the next one."""
        self.send(**facts)
        return self.receive(limit_s)

    def line(self, limit_s: float) -> bytes:
        """Returns the next line of the program's output. Raises ContenderFailed."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(deadline - time.monotonic()):
                    raise self.failure(f"did not answer within {limit_s:g} s")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise self.failure("ended")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def pause(self) -> None:
        """Stops the program and its descendants, so that polling uses no processor time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Lets the program exit by itself, then kills its remaining processes.

        A program that reads lines exits when its input closes; others are interrupted. A killed
        program does not clean up: vLLM's shared memory or Ray's folder remain.
        """
        if self._process is None:
            return
        self.resume()
        below = set(self.pids)
        if self.alive and not self._has_stdin:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        deadline = time.monotonic() + _VANISH_S
        while (left := below & set(descendants(os.getpid()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        end(left)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def failure(self, event: str) -> ContenderFailed:
        """Returns the error to raise: what happened, and the last lines of the log."""
        code = None
        if self._process is not None and event.startswith("ended"):
            # its output closes a little before it exits
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_EXIT_S)
        ended = f" (exit code {code})" if code is not None else ""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        text = "\n  ".join([f"{self.name} {event}{ended}", *lines[-_LAST_LINES:]])
        return ContenderFailed(text)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def cpu_time_s(pids: Iterable[int]) -> float:
    """Returns the processor time that these processes have used, without children that have
    exited."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text()
            fields = text[text.rindex(")") + 2 :].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_all() -> None:
    """Kills every descendant of this process."""
    end(descendants(os.getpid()))


def _python_path() -> list[str]:
    """Returns the path on which our programs, started by file name, find `tests.benchmarks`."""
    return [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
