"""Claims of ports: which application may listen at a host and port of this machine.

The ingresses of one application share a port (SO_REUSEPORT). The kernel would let any other
application of the same user share it too, and would distribute connections between both. So a
process makes a claim before it listens, or before it starts an application that will:

    /tmp/swell-ports-UID / gate              locked while claims are read and made
                         / NETWORK-PORT-HOST one claim; each holder has a shared lock on it

- Claims of one *owner* (an application of one Ray cluster) may be held by many processes. Claims of
  two owners never overlap. Claims overlap if they have the same port in the same network namespace,
  and if the hosts are the same or one of them means all addresses.
- A claim is alive while a process holds it. If all holders are gone without `release`, for example
  because an ingress was killed, the claim lives for `LEASE_S` after the last `renew` if its
  *supervisor* (the raylet, which outlives ingresses) lives: a successor may still come.
- The kernel drops the locks of dead processes, so a claim outlives its Ray by at most that time.

Sockets of another user never share a port with ours, so claims are per user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from swell.configs.schema import ConfigError

LEASE_S = 120.0
"""Longer than Serve takes to replace an ingress, even on a busy host."""
_WILDCARDS = ("0.0.0.0", "::", "")
_ANY = "any"
_GATE_S = 10.0
"""How long other processes may hold the gate; each reads and writes a few lines."""
_POLL_S = 0.01


class Supervisor(msgspec.Struct, frozen=True):
    """A process, distinguished from later ones with the same pid."""

    pid: int
    started: str
    """Start time in clock ticks since boot; empty: the process is gone."""

    @classmethod
    def of(cls, pid: int) -> Supervisor:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            return cls(pid, "" if fields[0] in "ZX" else fields[19])
        return cls(pid, "")

    @property
    def is_alive(self) -> bool:
        return bool(self.started) and Supervisor.of(self.pid) == self


class _Record(msgspec.Struct, frozen=True):
    owner: str
    supervisor: Supervisor
    pid: int
    """The process that last wrote the record, for error messages."""


class PortClaims:
    """The claims of this user in the network namespace of this process."""

    def __init__(
        self, folder: Path | None = None, now: Callable[[], float] = time.time, network: str = ""
    ) -> None:
        """`now`: the clock of file times."""
        self._folder = folder or Path(f"/tmp/swell-ports-{os.getuid()}")
        self._now = now
        self._network = network or str(os.stat("/proc/self/ns/net").st_ino)

    def check(self, host: str, port: int, is_own: Callable[[str], bool]) -> None:
        """Raises ConfigError if there is an overlapping claim of an owner that is not `is_own`."""
        if self._folder.exists():
            with self._gate():
                self._check(_name(host), host, port, is_own)

    def claim(self, host: str, port: int, owner: str, supervisor: int) -> PortClaim:
        """Makes a claim that this process holds. `supervisor`: the process that lives as long as
        the application. Raises ConfigError if another owner has an overlapping claim."""
        with self._gate():
            self._check(_name(host), host, port, owner.__eq__)
            path = self._folder / f"{self._network}-{port}-{_name(host)}"
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)  # free, or shared by the same owner
            held = PortClaim(self, path, lock, owner, Supervisor.of(supervisor))
            held.write()
            return held

    def _check(self, name: str, host: str, port: int, is_own: Callable[[str], bool]) -> None:
        for path in sorted(self._folder.glob(f"{self._network}-{port}-*")):
            other = path.name.split("-", 2)[2]
            if name != other and _ANY not in (name, other):
                continue
            record = self._living(path)
            if record is not None and not is_own(record.owner):
                raise ConfigError(
                    f"serve.port={port} on {host} is in use by another application "
                    f"({record.owner}, process {record.pid}); stop that one, or choose another "
                    "port (--port P, or serve.port)",
                    "serve.port",
                )

    def _living(self, path: Path) -> _Record | None:
        """Returns the claim if it is alive; else removes its file and returns None."""
        try:
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            record = _read(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return record or _Record("one that has just started", Supervisor(0, ""), 0)
            fresh = os.fstat(lock).st_mtime > self._now() - LEASE_S
            if record is not None and fresh and record.supervisor.is_alive:
                return record
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        """Lets one process at a time read and make claims. Raises ConfigError if the folder is not
        private."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if found.st_uid != os.getuid() or self._folder.is_symlink() or found.st_mode & 0o022:
            raise ConfigError(
                f"{self._folder} belongs to another user, is a link, or is writable "
                "by others; remove it"
            )
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        gate, end_s = os.open(self._folder / "gate", flags, 0o600), time.monotonic() + _GATE_S
        try:
            while True:
                try:
                    fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise ConfigError(
                            f"another process has held {self._folder / 'gate'} for {_GATE_S:g} s; "
                            "stop it"
                        ) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(gate)


class PortClaim:
    """One claim that this process holds, made by `PortClaims`."""

    def __init__(
        self, claims: PortClaims, path: Path, lock: int, owner: str, supervisor: Supervisor
    ) -> None:
        self._claims = claims
        self._path = path
        self._lock = lock
        self._owner = owner
        self._supervisor = supervisor

    def write(self) -> None:
        """Writes the record. The caller holds the gate."""
        data = msgspec.json.encode(_Record(self._owner, self._supervisor, os.getpid()))
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, data, 0)
        self.renew()

    def renew(self) -> None:
        """Extends the claim: it outlives this process by `LEASE_S` from now."""
        now_s = self._claims._now()
        os.utime(self._lock, (now_s, now_s))

    def set_owner(self, owner: str) -> None:
        """Gives the claim to another owner; no other process may hold it."""
        with self._claims._gate():
            self._owner = owner
            self.write()

    def release(self, *, ends: bool) -> None:
        """Stops holding the claim. `ends`: the application stops, so the claim does not wait for a
        successor."""
        if self._lock < 0:
            return
        try:
            if ends:
                # Other processes of the application may hold the claim.
                with self._claims._gate(), contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._path.unlink(missing_ok=True)
        finally:
            os.close(self._lock)
            self._lock = -1


def _read(lock: int) -> _Record | None:
    """Returns the record; None: it was never written completely."""
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=_Record)
    except msgspec.MsgspecError:
        return None


def _name(host: str) -> str:
    """Returns the same name for all spellings of an address."""
    if host in _WILDCARDS:
        return _ANY
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = host
    return _ANY if address in _WILDCARDS else address.replace("/", "_")
