"""A real cluster in a child process, as a user starts it; it must leave nothing behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "configs" / "models" / "nano"
START_S = 150


def leftovers() -> set[Path]:
    """What a cluster makes outside of its processes."""
    return {*Path("/tmp").glob("swell-*"), *Path("/dev/shm").iterdir()}


def listen_to_ctrl_c() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Cluster:
    """`swell serve` until `stop`. Use as a context manager."""

    def __init__(self, source: str | Path, *settings: str, command: str = "serve") -> None:
        self._marker = f"SWELL_TEST_CLUSTER={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._marker.partition("=")
        self._before = leftovers()
        sets = [part for setting in settings for part in ("--set", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swell.cluster", command, str(source), "--port", "0", *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ray names its processes by setproctitle, which else wipes the environment.
            env={**os.environ, name: value, "SPT_NOENV": "1"},
            start_new_session=True,
            preexec_fn=listen_to_ctrl_c,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""

    def __enter__(self) -> Cluster:
        self.url = self.wait_for("ready: ").split()[1]
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def wait_for(self, start: str) -> str:
        """The first line that begins so. Raises AssertionError with the output if none comes."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                line = self._queue.get(timeout=1)
            except queue.Empty:
                continue
            if line is None:
                break
            if line.startswith(start):
                return line
        self.kill()
        raise AssertionError(f"no line {start!r} in:\n" + "\n".join(self.lines))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def wait_idle(self) -> None:
        """Until every engine says that all of its slots and blocks are free."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            engines = self.get("/admin/idle").json()["engines"]
            if engines and all(engine["idle"] for engine in engines):
                return
            time.sleep(0.05)
        raise AssertionError(f"not idle: {engines}")

    def stop(self) -> None:
        """Ctrl-C. Raises AssertionError unless it ends well and leaves nothing behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("did not stop:\n" + "\n".join(self.lines)) from None
        assert code == 0, f"exit {code}:\n" + "\n".join(self.lines)
        self.assert_gone()

    def assert_gone(self) -> None:
        """No process, no folder of Ray, no shared memory."""
        deadline = time.monotonic() + 20
        while left := list(self._members()):
            assert time.monotonic() < deadline, f"processes left: {[_name(p) for p in left]}"
            time.sleep(0.1)
        assert leftovers() <= self._before, leftovers() - self._before

    def kill(self) -> None:
        self.process.kill()
        for pid in self._members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _members(self) -> Iterable[int]:
        """Processes that inherited our marker."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and self._marker.encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)
            except OSError:
                continue

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except OSError:
        return str(pid)
