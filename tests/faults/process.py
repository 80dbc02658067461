"""A real cluster in a child process, as a user starts it; it must remove everything when it
stops."""

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

from tests.support import reaper
from tests.support.deadlines import HANG_S

_LISTEN = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""
HTTP = httpx.Client(
    trust_env=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=HANG_S
)
"""An HTTP client with a connection for each request, as `httpx.get`. That function reads all
certificates each time: 45 ms of processor time, which a cluster needs."""
_SWELL = (sys.executable, "-m", "swell.cluster")
_RAY_FOLDER = re.compile(r"/tmp/swell-\w+")
"""The folder that `swell serve` creates for its own Ray."""


class ClusterFailed(RuntimeError):
    """A cluster did not start, did not stop, or did not remove something."""


def leftovers() -> set[Path]:
    """Returns the files that a cluster creates outside of its processes, without those that a
    living process uses."""
    folders = {path for path in Path("/tmp").glob("swell-*") if _RAY_FOLDER.fullmatch(str(path))}
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    used = {name for pid in pids for name in _RAY_FOLDER.findall(title(pid))}
    return {*(folders - set(map(Path, used))), *Path("/dev/shm").iterdir()}


def enable_sigint() -> None:
    """Restores the default of SIGINT: a shell starts background processes with SIGINT ignored, and
    children inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Cluster:
    """Runs `swell serve` until `stop`. Used as a context manager."""

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
            # Ray renames its processes with setproctitle, which otherwise wipes the environment.
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
        """Returns the first line with this start. Raises ClusterFailed with the output if none
        appears."""
        deadline = time.monotonic() + HANG_S
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
        return HTTP.get(self.url + path, timeout=HANG_S)

    def post(self, path: str, body: object) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, timeout=HANG_S)

    def wait_idle(self) -> None:
        """Waits until every engine reports that all its slots and blocks are free."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            engines = self.get("/admin/idle").json()["engines"]
            if engines and all(engine["idle"] for engine in engines):
                return
            time.sleep(0.05)
        raise ClusterFailed(f"not idle: {engines}")

    def stop(self) -> None:
        """Sends Ctrl-C. Raises ClusterFailed unless the command exits with 0 and everything is
        removed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ClusterFailed("did not stop:\n" + "\n".join(self.lines)) from None
        if code != 0:
            self.kill()
            raise ClusterFailed(f"exit {code}:\n" + "\n".join(self.lines))
        self.assert_gone()

    def assert_gone(self) -> None:
        """Waits until no process, no folder of Ray and no shared memory is left. Raises
        ClusterFailed."""
        deadline = time.monotonic() + HANG_S
        while left := list(self.members()):
            if time.monotonic() > deadline:
                raise ClusterFailed(f"processes left: {[title(pid)[:120] for pid in left]}")
            time.sleep(0.1)
        while more := leftovers() - self._before:  # other tests use shared memory for a moment
            if time.monotonic() > deadline:
                raise ClusterFailed(f"left behind: {sorted(map(str, more))}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills every process at once, and removes Ray's folder, which they no longer can."""
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
        """Yields the living processes that inherited our marker: only those of this cluster."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pid = int(folder.name)
                if alive(pid) and self._marker.encode() in (folder / "environ").read_bytes():
                    yield pid
            except OSError:
                continue

    def named(self, part: str) -> list[int]:
        """Returns our living processes whose title contains `part`."""
        return [pid for pid in self.members() if part in title(pid)]

    @property
    def urls(self) -> list[str]:
        """The addresses of the ingresses: all of them share one."""
        return [self.url]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def listeners(self) -> int:
        """Returns the number of sockets that listen on the cluster's port: one for each ingress."""
        return listeners(self.port)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def listeners(port: int, process: int | str = "self") -> int:
    """Returns the number of sockets on that process's host that listen on `port`; several may share
    it."""
    rows = []
    for table in (Path(f"/proc/{process}/net", name) for name in ("tcp", "tcp6")):
        with contextlib.suppress(OSError):  # the protocol is not there, or the process is gone
            rows += [line.split() for line in table.read_text().splitlines()]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN for row in rows)


def title(pid: int) -> str:
    """Returns the command line of a process or the title that it has set; its number once it is
    gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
