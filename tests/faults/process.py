"""A real cluster in a child process, as a user starts it; it must leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests import reaper

START_S = 280
_STOP_S = 180
"""Longer than `cluster.drain_timeout_s` and what follows it may take."""
_VANISH_S = 60
"""Ray's processes may end a little after the one that started them."""
_IDLE_S = 30
_LISTEN = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""
HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
"""A connection for each request, as `httpx.get` has it, which reads all certificates each time: 45
ms of processor time, while a cluster needs it."""
_SWELL = (sys.executable, "-m", "swell.cluster")
_RAY_FOLDER = re.compile(r"/tmp/swell-\w+")
"""The folder that `swell serve` gives to its own Ray."""


class ClusterFailed(RuntimeError):
    """A cluster that did not start, did not stop, or left something behind."""


def leftovers() -> set[Path]:
    """Files that a cluster makes outside of its processes, without those that a living process
    uses."""
    folders = {path for path in Path("/tmp").glob("swell-*") if _RAY_FOLDER.fullmatch(str(path))}
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    used = {name for pid in pids for name in _RAY_FOLDER.findall(title(pid))}
    return {*(folders - set(map(Path, used))), *Path("/dev/shm").iterdir()}


def enable_sigint() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Cluster:
    """`swell serve` until `stop`. Use as a context manager."""

    def __init__(
        self,
        source: str | Path,
        *settings: str,
        command: str = "serve",
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """`prefix`: words before the command; `options`: further ones after it."""
        self._marker = f"SWELL_TEST_CLUSTER={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._marker.partition("=")
        self._before = leftovers()
        reaper.start()
        sets = [part for setting in settings for part in ("--set", setting)]
        self.process = subprocess.Popen(
            [*prefix, *_SWELL, command, str(source), "--port", "0", *options, *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ray names its processes by setproctitle, which else wipes the environment.
            env={**os.environ, name: value, "SPT_NOENV": "1"},
            start_new_session=True,
            preexec_fn=enable_sigint,
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
        """The first line that begins so. Raises ClusterFailed with the output if none comes."""
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
        raise ClusterFailed(f"no line {start!r} in:\n" + "\n".join(self.lines))

    def get(self, path: str) -> httpx.Response:
        return HTTP.get(self.url + path, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, timeout=120)

    def wait_idle(self) -> None:
        """Wait until every engine reports that all its slots and blocks are free."""
        deadline = time.monotonic() + _IDLE_S
        while time.monotonic() < deadline:
            engines = self.get("/admin/idle").json()["engines"]
            if engines and all(engine["idle"] for engine in engines):
                return
            time.sleep(0.05)
        raise ClusterFailed(f"not idle: {engines}")

    def stop(self) -> None:
        """Ctrl-C. Raises ClusterFailed unless it ends well and leaves nothing behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ClusterFailed("did not stop:\n" + "\n".join(self.lines)) from None
        if code != 0:
            self.kill()
            raise ClusterFailed(f"exit {code}:\n" + "\n".join(self.lines))
        self.assert_gone()

    def assert_gone(self) -> None:
        """No process, no folder of Ray, no shared memory. Raises ClusterFailed."""
        deadline = time.monotonic() + _VANISH_S
        while left := list(self.members()):
            if time.monotonic() > deadline:
                raise ClusterFailed(f"processes left: {[title(pid)[:120] for pid in left]}")
            time.sleep(0.1)
        while more := leftovers() - self._before:  # other tests share memory for a moment
            if time.monotonic() > deadline:
                raise ClusterFailed(f"left behind: {sorted(map(str, more))}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End every process at once, and remove Ray's folder, which they cannot any more."""
        members = [self.process.pid, *self.members()]
        folders = {name for pid in members for name in _RAY_FOLDER.findall(title(pid))}
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def members(self) -> Iterator[int]:
        """Living processes that inherited our marker: those of this cluster alone."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pid = int(folder.name)
                if alive(pid) and self._marker.encode() in (folder / "environ").read_bytes():
                    yield pid
            except OSError:
                continue

    def named(self, part: str) -> list[int]:
        """Living processes of ours whose title holds `part`."""
        return [pid for pid in self.members() if part in title(pid)]

    @property
    def urls(self) -> list[str]:
        """Where its ingresses answer: all of them share one address."""
        return [self.url]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def listeners(self) -> int:
        """How many sockets listen at its port: one of each ingress."""
        return listeners(self.port)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)


def alive(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def listeners(port: int, process: int | str = "self") -> int:
    """Sockets of the host of that process that listen at `port`; several may share it."""
    rows = []
    for table in (Path(f"/proc/{process}/net", name) for name in ("tcp", "tcp6")):
        with contextlib.suppress(OSError):  # no such protocol, or the process is gone
            rows += [line.split() for line in table.read_text().splitlines()]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN for row in rows)


def title(pid: int) -> str:
    """Its command line, or what it calls itself; its number once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
