"""Events, counters and stacks of a process, which other processes of the account can read: they
explain a hang even if the process itself does nothing any more.

    recording process                                   reading process (on the same host)
    note, counter --> memory (`memfd`) <--------------- `describe_group`: events and counters
    a thread      --> stacks (`memfd`) <--  pipe  <---- asks the thread for all stacks
    faulthandler  --> stacks (`memfd`) <-- signal <---- if the thread cannot run: of a hanging one

These are descriptors without names in the file system, which a reader opens through `/proc/PID/fd`.
So nothing remains when the process exits. The kernel describes threads and connections even of a
suspended process.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from swell.configs.runtime.process import exit_on_error

_HEADER_BYTES = 256
"""Process id, descriptors of stacks and of requests, name and group, in one line each."""
_COUNTERS, _COUNTER_BYTES = 24, 64
"""Number and size of the counters: a name, then the operations that were started and finished."""
_EVENTS, _EVENT_BYTES = 128, 256
"""Number and size of the newest events: the time, then the text."""
_NUM_EVENTS_AT = _HEADER_BYTES + _COUNTERS * _COUNTER_BYTES
_EVENTS_AT = _NUM_EVENTS_AT + 8
_SIZE = _EVENTS_AT + _EVENTS * _EVENT_BYTES
_NAME_BYTES = _COUNTER_BYTES - 16
_MEMORY = "swell-flight"
_LINK = f"/memfd:{_MEMORY} (deleted)"
_STACKS_BYTES = 1 << 20
"""Above this size the stacks begin again at the start of their file."""
_FRAMES = 60
"""Maximum number of frames of a stack."""
_SIGNAL = signal.SIGUSR1
_ANSWER_S = 0.5
"""How long all processes together have to write their stacks; the same for signal handlers."""
_POLL_S = 0.01
_TCP_STATES = {
    "01": "established",
    "02": "connecting",
    "03": "accepting",
    "04": "closing, sent FIN",
    "05": "closing, FIN acknowledged",
    "08": "closed by the peer",
    "09": "closing, last ACK",
    "0A": "listening",
}


class FlightRecorder:
    """The record of this process. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_MEMORY)
        os.ftruncate(self._file, _SIZE)
        self._memory = mmap.mmap(self._file, _SIZE)
        self._lock = threading.Lock()
        self._num_events = 0
        self._num_counters = 0
        self._stacks = self._requests = -1
        self._header = b""

    def publish(self, group: str, name: str) -> None:
        """Lets other processes read the record from now on. `group`: the same for all processes
        that work together; `name`: the name of this process in it. A later call changes both."""
        with self._lock:
            if not self._header:
                self._header = self._start().encode()
            header = self._header + f"{name}\n{group}\n".encode()
            self._memory[:_HEADER_BYTES] = header[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")

    def _start(self) -> str:
        self._stacks = os.memfd_create("swell-stacks")
        self._requests, for_readers = os.pipe()
        faulthandler.register(_SIGNAL, self._stacks, all_threads=True)
        run = exit_on_error(self._answer_forever, "flight recorder")
        threading.Thread(target=run, name="swell-recorder", daemon=True).start()
        return f"{os.getpid()}\n{self._stacks}\n{for_readers}\n"

    def note(self, text: str) -> None:
        """Records an event; the oldest one is lost. Texts are cut after 248 bytes."""
        event = struct.pack("d", time.time()) + text.encode()[: _EVENT_BYTES - 8]
        with self._lock:
            start = _EVENTS_AT + self._num_events % _EVENTS * _EVENT_BYTES
            self._memory[start : start + _EVENT_BYTES] = event.ljust(_EVENT_BYTES, b"\0")
            self._num_events += 1
            struct.pack_into("Q", self._memory, _NUM_EVENTS_AT, self._num_events)

    def counter(self, name: str) -> memoryview | array[int]:
        """Returns two numbers that the caller sets: how many operations it has started and
        finished. The first 24 names are recorded."""
        with self._lock:
            if self._num_counters == _COUNTERS:
                return array("Q", [0, 0])
            start = _HEADER_BYTES + self._num_counters * _COUNTER_BYTES
            self._num_counters += 1
            text = name.encode()[:_NAME_BYTES]
            self._memory[start : start + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")
            return memoryview(self._memory)[start + _NAME_BYTES : start + _COUNTER_BYTES].cast("Q")

    def _answer_forever(self) -> None:
        while os.read(self._requests, 4096):
            text = "".join(_stacks_of_all_threads())
            with suppress(OSError):  # without memory there are no stacks, and nothing else stops
                if os.fstat(self._stacks).st_size > _STACKS_BYTES:
                    os.ftruncate(self._stacks, 0)
                    os.lseek(self._stacks, 0, os.SEEK_SET)
                os.write(self._stacks, text.encode())


@cache
def recorder() -> FlightRecorder:
    """Returns the recorder of this process."""
    return FlightRecorder()


def _stacks_of_all_threads() -> Iterator[str]:
    """Yields lines as `faulthandler` writes them. They contain no source: a file system may be what
    hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, newest in sys._current_frames().items():
        yield f"Thread {names.get(ident, ident)} (most recent call first):\n"
        frame: FrameType | None = newest
        for _ in range(_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}\n'
            frame = frame.f_back


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Process:
    """A process of this host that records."""

    pid: int
    name: str
    group: str
    memory: bytes
    stacks: Path
    requests: Path

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        """Returns None if the process does not record, has exited, or belongs to another user."""
        folder = Path(f"/proc/{pid}/fd")
        with suppress(OSError, ValueError):
            for descriptor, link in _open_files(pid):
                if link == _LINK:
                    memory = descriptor.read_bytes()
                    header = memory[:_HEADER_BYTES].decode(errors="replace").split("\n")
                    own, stacks, requests, name, group = header[:5]
                    if int(own) == pid:  # otherwise a fork of that process
                        paths = folder / stacks, folder / requests
                        return cls(pid, name, group, memory, *paths)
        return None

    def counters(self) -> Iterator[str]:
        for index in range(_COUNTERS):
            start = _HEADER_BYTES + index * _COUNTER_BYTES
            name = self.memory[start : start + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
            if name:
                counts = struct.unpack_from("QQ", self.memory, start + _NAME_BYTES)
                yield f"{name}: {counts[0]} started, {counts[1]} finished"

    def events(self) -> Iterator[str]:
        (total,) = struct.unpack_from("Q", self.memory, _NUM_EVENTS_AT)
        for index in range(max(0, total - _EVENTS), total):
            start = _EVENTS_AT + index % _EVENTS * _EVENT_BYTES
            (at,) = struct.unpack_from("d", self.memory, start)
            text = self.memory[start + 8 : start + _EVENT_BYTES].rstrip(b"\0")
            clock = time.strftime("%H:%M:%S", time.gmtime(at)) + f"{at % 1:.3f}"[1:]
            yield f"{clock} {text.decode(errors='replace')}"

    def stacks_size(self) -> int:
        return self.stacks.stat().st_size

    def ask_for_stacks(self) -> None:
        descriptor = os.open(self.requests, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)

    def signal(self) -> None:
        """Lets the process write its stacks without its interpreter, which may fail: only for a
        process that is about to be killed. Without a handler the signal would kill it at once."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (_SIGNAL - 1) & 1:
                os.kill(self.pid, _SIGNAL)


def group_of(pid: int) -> str:
    """Returns the group of a process of this host; empty if it does not record."""
    process = _Process.read(pid)
    return "" if process is None else process.group


def describe_group(group: str, hanging: Collection[int]) -> str:
    """Returns the state of the processes of this host that record for this group, for people: what
    they have counted and noted, their threads and connections, and the stacks. `hanging`: those
    that will be killed afterwards. Takes about a second at most."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    found = [process for process in map(_Process.read, pids) if process and process.group == group]
    sizes: dict[int, int] = {}
    for process in found:
        with suppress(OSError):
            sizes[process.pid] = process.stacks_size()
            process.ask_for_stacks()
    _wait_for_stacks(found, sizes)
    silent = [each for each in found if each.pid in hanging and not _has_written(each, sizes)]
    for process in silent:
        with suppress(OSError):
            process.signal()
    if silent:
        _wait_for_stacks(silent, sizes)
    found.sort(key=lambda process: process.name)
    return "\n".join(
        _describe(process, sizes.get(process.pid, 0), process.pid in hanging) for process in found
    )


def _has_written(process: _Process, sizes: Mapping[int, int]) -> bool:
    with suppress(OSError):
        return process.stacks_size() != sizes.get(process.pid, 0)
    return True  # it has exited


def _wait_for_stacks(processes: Collection[_Process], sizes: Mapping[int, int]) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        if all(_has_written(process, sizes) for process in processes):
            time.sleep(_POLL_S)  # a signal handler writes line by line
            return
        time.sleep(_POLL_S)


def _describe(process: _Process, old_size: int, is_hanging: bool) -> str:
    stacks = b""
    with suppress(OSError):
        written = process.stacks.read_bytes()
        stacks = written[old_size:] if len(written) > old_size else b""
    text = stacks[:_STACKS_BYTES].decode(errors="replace")
    state = "hangs" if is_hanging else "runs"
    parts = {
        "threads, as the kernel sees them": _threads(process.pid),
        "operations of groups since they were formed": process.counters(),
        "connections": _connections(process.pid),
        "newest events (UTC)": process.events(),
        "stacks": text.splitlines() or ["the process did not write them: it is suspended"],
    }
    lines = [f"== {process.name} (pid {process.pid}), {state}"]
    for title, part in parts.items():
        lines += ["", f"-- {title}", *part]
    return "\n".join(lines) + "\n"


def _threads(pid: int) -> Iterator[str]:
    for folder in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            name = (folder / "comm").read_text().strip()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            waits = (folder / "wchan").read_text().strip()
            yield f"{folder.name} {name}: state {state}, waits in {waits or '-'}"


def _open_files(pid: int) -> Iterator[tuple[Path, str]]:
    """Yields the descriptors of a process, and what they refer to. Some may be closed meanwhile."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield descriptor, os.readlink(descriptor)


def _connections(pid: int) -> Iterator[str]:
    inodes = {
        link.removeprefix("socket:[").rstrip("]")
        for _, link in _open_files(pid)
        if link.startswith("socket:[")
    }
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                state = _TCP_STATES.get(fields[3], fields[3])
                if fields[9] in inodes and state != "listening":
                    unsent, unread = (int(number, 16) for number in fields[4].split(":"))
                    yield (
                        f"{_address(fields[1])} -> {_address(fields[2])}: {state}, "
                        f"{unsent} bytes not acknowledged, {unread} not read, "
                        f"{int(fields[6], 16)} retransmissions"
                    )


def _address(text: str) -> str:
    """Returns an address of the kernel's table, whose words have the byte order of the machine."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    name = socket.inet_ntop(family, words if sys.byteorder == "little" else raw)
    return f"{name}:{int(port, 16)}"
