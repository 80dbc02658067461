"""Hosts on one machine that only differ in their network: namespaces on a bridge.

Every host has its own address and link. The link can be taken down, lose the packets of one
direction, or be slow; and two hosts can be cut off from each other only. The machine itself is on
the bridge too, as a client of all hosts; its own network stays unchanged. A process sees the
machine's files and its host name, which does not resolve to the address of any host.

Needs root on Linux, and `ip`, `tc` and `bridge` of iproute2: see `refusal`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

from tests.faults.process import alive, title
from tests.support import reaper
from tests.support.deadlines import HANG_S

_SLOW = "tbf rate 2mbit burst 16kb latency 400ms"
"""The rule of either direction of a slow link: packets wait at most this long and are then lost."""
_DROP_ALL = ("protocol", "all", "bpf", "da", "bytecode", "1,6 0 0 2")
"""A filter of `tc` whose only instruction returns TC_ACT_SHOT."""
_DROP_PORTS = (
    "40 0 0 12,"  # load the protocol of the Ethernet frame
    "21 0 7 2048,"  # if it is not IPv4: pass
    "48 0 0 23,"  # load the protocol of the packet
    "21 0 5 6,"  # if it is not TCP: pass
    "177 0 0 14,"  # load the length of the packet's header
    "72 0 0 16,"  # load the destination port
    "53 0 2 {first},"  # if it is lower: pass
    "37 1 0 {last},"  # if it is higher: pass
    "6 0 0 2,6 0 0 0"
)
"""The same for packets to a range of TCP ports."""
_SEEN_AS = {"from": "ingress", "to": "egress"}
"""The direction of a host's packets, as seen at the machine's end of its link."""


class HostsFailed(RuntimeError):
    """A command of `ip` or Ray failed, or something was not removed."""


def refusal() -> str | None:
    """Returns the reason why this process may not create hosts; None if it may."""
    programs = ("ip", "tc", "bridge")
    if not sys.platform.startswith("linux") or None in map(shutil.which, programs):
        return "network namespaces need Linux and the commands `ip`, `tc` and `bridge`"
    name = f"swell-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except HostsFailed as error:
        return f"network namespaces may not be made here: {error}"
    try:
        _ip("link", "add", _link(9), "type", "veth", "peer", "name", "eth0", "netns", name)
        return None
    except HostsFailed as error:
        return f"links between network namespaces may not be made here: {error}"
    finally:
        _ip("netns", "del", name)


class Namespaces:
    """`count` hosts, numbered from 0. Used as a context manager, which removes everything when it
    closes."""

    def __init__(self, count: int) -> None:
        pid = os.getpid()
        self._names = [f"swell-{pid}-{host}" for host in range(count)]
        self._subnet = f"10.{64 + pid % 64}.{pid // 64 % 256}"
        self._bridge = f"sw{pid}b"
        self._folder = Path()

    @property
    def addresses(self) -> list[str]:
        return [f"{self._subnet}.{host + 1}" for host in range(len(self._names))]

    @property
    def machine(self) -> str:
        """Returns the address of the machine itself."""
        return f"{self._subnet}.254"

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        try:
            self._make_network()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the programs of the hosts; none here."""

    def prefix(self, host: int) -> list[str]:
        """Returns the words before a command that runs it on this host."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self, host: int) -> None:
        """Takes the link of a host down, in both directions; connections are not reset."""
        _ip("link", "set", _link(host), "down")

    def drop(self, host: int, direction: Literal["from", "to"], ports: range | None = None) -> None:
        """Drops every packet of one direction, or only packets to these TCP ports."""
        rule = _DROP_ALL
        if ports is not None:
            code = _DROP_PORTS.format(first=ports[0], last=ports[-1])
            rule = (*_DROP_ALL[:-1], f"{code.count(',') + 1},{code}")
        _tc("qdisc", "replace", "dev", _link(host), "clsact")
        _tc("filter", "add", "dev", _link(host), _SEEN_AS[direction], *rule)

    def slow(self, host: int) -> None:
        """Makes the link slow in both directions, with a queue that overflows."""
        for namespace, link in ((), _link(host)), (("-n", self._names[host]), "eth0"):
            _tc(*namespace, "qdisc", "replace", "dev", link, "root", *_SLOW.split())

    def part(self, first: int, second: int) -> None:
        """Drops every packet between two hosts; all others, and clients, reach both."""
        for host in (first, second):
            _isolate(host, "on")

    def heal(self, host: int) -> None:
        """Undoes `cut`, `drop` and `slow`, and `part` for every host."""
        for other in range(len(self._names)):
            with contextlib.suppress(HostsFailed):  # the host is lost
                _isolate(other, "off")
        for words in (
            ("qdisc", "del", "dev", _link(host), "clsact"),
            ("qdisc", "del", "dev", _link(host), "root"),
            ("-n", self._names[host], "qdisc", "del", "dev", "eth0", "root"),
        ):
            with contextlib.suppress(HostsFailed):  # the link has none
                _tc(*words)
        _ip("link", "set", _link(host), "up")

    def lose(self, host: int) -> None:
        """Simulates a loss of power: the link is cut, then every process is killed at once, and no
        packet tells the others."""
        self.cut(host)
        self.kill(host)
        _ip("netns", "del", self._names[host])
        self._delete_link(host)

    def is_up(self, host: int) -> bool:
        return Path("/run/netns", self._names[host]).exists()

    def pids(self, host: int) -> list[int]:
        """Returns every process of this host; none while it is lost."""
        if not self.is_up(host):
            return []
        namespace = os.stat(Path("/run/netns", self._names[host])).st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process is gone
                if os.stat(folder / "ns" / "net").st_ino == namespace:
                    found.append(int(folder.name))
        return found

    def named(self, host: int, part: str) -> list[int]:
        """Returns the living processes of this host whose title contains `part`."""
        return [pid for pid in self.pids(host) if alive(pid) and part in title(pid)]

    def kill(self, host: int) -> None:
        """Kills every process of this host at once, as a loss of power does."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        """Kills every process and removes the network. Raises HostsFailed if something is left."""
        for host, name in enumerate(self._names):
            if self.is_up(host):
                self.kill(host)
                _ip("netns", "del", name)
            self._delete_link(host)
        if Path("/sys/class/net", self._bridge).exists():
            _ip("link", "del", self._bridge)
        remove(self._folder)
        wait_until(lambda: not self._left(), lambda: f"left behind: {self._left()}")

    def _make_network(self) -> None:
        for host, name in enumerate(self._names):
            reaper.run_at_the_end(["ip", "netns", "del", name])
            reaper.run_at_the_end(["ip", "link", "del", _link(host)])
        reaper.run_at_the_end(["ip", "link", "del", self._bridge])
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.machine}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in range(len(self._names)):
            self._make_host(host)

    def _make_host(self, host: int) -> None:
        name, link = self._names[host], _link(host)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        # A host that comes back has its former hardware address.
        _ip("-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{host + 1:02x}")
        _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "via", self.machine)

    def _delete_link(self, host: int) -> None:
        """Deletes the link. A connection that is still being closed keeps its namespace, and so the
        link, for minutes."""
        if Path("/sys/class/net", _link(host)).exists():
            with contextlib.suppress(HostsFailed):  # gone meanwhile
                _ip("link", "del", _link(host))

    def _left(self) -> list[str]:
        links = [
            link for link in os.listdir("/sys/class/net") if link.startswith(f"sw{os.getpid()}")
        ]
        spaces = Path("/run/netns")
        names = set(os.listdir(spaces)) if spaces.exists() else set()
        return links + sorted(names & set(self._names))


def _link(host: int) -> str:
    """Returns the name of the machine's end of a host's link; the kernel allows 15 characters."""
    return f"sw{os.getpid()}-{host}"


def remove(folder: Path) -> None:
    """Removes what programs left in a folder, unless logs are kept."""
    if not os.environ.get("SWELL_KEEP_LOGS"):
        shutil.rmtree(folder, ignore_errors=True)


def _isolate(host: int, state: Literal["on", "off"]) -> None:
    """Isolates a host's port of the bridge, or ends this. The bridge passes no packets between
    isolated ports."""
    run(["bridge", "link", "set", "dev", _link(host), "isolated", state])


def _ip(*words: str) -> str:
    return run(["ip", *words])


def _tc(*words: str) -> str:
    return run(["tc", *words])


def run(command: Sequence[str], limit_s: float = HANG_S) -> str:
    """Runs a command; returns its output. Raises HostsFailed with the last lines of it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise HostsFailed(f"{' '.join(command)}: no end after {limit_s:g} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise HostsFailed(f"{' '.join(command)}: " + " / ".join(lines))
    return done.stdout


def wait_until(
    is_done: Callable[[], bool], problem: Callable[[], str], limit_s: float = HANG_S
) -> None:
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline:
            raise HostsFailed(problem())
        time.sleep(0.1)
