"""Runs `swell serve` as a child process and watches it from its first line to its last
descendant."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

from swell.cluster.cli.http_client import ServerError

_STOP_S = 45.0
_VANISH_S = 10.0
"""Time for Ray's processes to exit after the process that started them."""
_PR_SET_CHILD_SUBREAPER = 36


class ServerProcess:
    """One server process. Its orphaned descendants become children of this process, so that `stop`
    finds all of them."""

    def __init__(self, config: str, port: int) -> None:
        serve = ["-m", "swell.cluster", "serve", config, "--port", str(port)]
        self._command = [sys.executable, *serve]
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[str | None] | None = None
        self.last_lines: deque[str] = deque(maxlen=15)

    async def start(self, limit_s: float) -> str:
        """Starts the server and returns the URL from its `ready:` line. Raises ServerError."""
        adopt_orphans()
        # Use a new session: Ctrl-C in a terminal reaches only this process, which stops the server
        # in order.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            url = await asyncio.wait_for(self._relay_until("ready: "), limit_s)
        except TimeoutError:
            raise ServerError(f"the server was not ready after {limit_s:g} s") from None
        finally:
            self._relay = asyncio.create_task(self._relay_until(None))
        if url is None:
            raise ServerError("the server exited before it was ready")
        return url

    async def _relay_until(self, prefix: str | None) -> str | None:
        """Prints lines up to one with `prefix`, and returns the rest of that line; None if there
        was none."""
        assert self._process is not None and self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.last_lines.append(line)
            print(f"  | {line}", flush=True)
            if prefix is not None and line.startswith(prefix):
                return line.removeprefix(prefix)
        return None

    async def stop(self) -> str | None:
        """Interrupts the server and waits. Returns None, or what was not clean. Kills remaining
        processes."""
        if self._process is None:
            return None
        error = None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            code = await asyncio.wait_for(self._process.wait(), _STOP_S)
            if code != 0:
                error = f"the server exited with code {code}"
        except TimeoutError:
            error = f"the server did not exit within {_STOP_S:g} s of SIGINT"
        left = await self._wait_for_descendants()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left and error is None:
            shown = ", ".join(f"{pid} ({name})" for pid, name in left.items())
            error = f"the server left processes running: {shown}"
        if self._relay is not None:
            self._relay.cancel()
        return error

    async def _wait_for_descendants(self) -> dict[int, str]:
        """Waits up to `_VANISH_S` for all descendants. Returns those that still run."""
        deadline = time.monotonic() + _VANISH_S
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return left


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process instead of process 1. Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> dict[int, str]:
    """Returns pid -> name of all running processes below `root`, without zombies. Empty without
    /proc."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        state, parent, *_ = text[text.rindex(")") + 2 :].split()
        parents[int(entry.parent.name)] = (int(parent), "" if state == "Z" else name)
    found, border = dict[int, str](), {root}
    while border:
        border = {pid for pid, (parent, _) in parents.items() if parent in border}
        found.update({pid: parents[pid][1] for pid in border})
    return {pid: name for pid, name in found.items() if name}
