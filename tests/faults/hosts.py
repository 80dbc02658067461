"""Several hosts on one machine: network namespaces on a bridge, each with a node of one Ray.

Every host has an address and a link of its own, which can be taken down, lose the packets of one
direction, or be slow. The machine itself is on the bridge too: a client of all hosts, whose own
network stays as it was. A process sees the machine's files and its host name, which resolves to an
address of no host.

Needs root on Linux, `ip` and `tc` of iproute2: see `refusal`. With `redis-server` on the path, Ray
keeps its state there, on the machine, so that the host of its GCS may be lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from swell.cluster.cli import ray_settings
from tests import reaper
from tests.faults.process import alive, title

_RAY_PORT = 6379
_REDIS_PORT = 6380
_COMMAND_S = 120.0
_VANISH_S = 20.0
_AUTH_MODE = "RAY_AUTH_MODE"
_NODE_SETTINGS = {
    # The hosts are no network of others; a token would lie in the home folder of the user.
    _AUTH_MODE: "disabled",
    # A link that is cut for some seconds shall not be the loss of a host: Ray's GCS takes a node
    # for dead after so many checks; one that is not answered takes timeout and period, 5 s.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "6",
    # Ray's own 15 lets every other process of the machine go first.
    "RAY_worker_niceness": "0",
}
_SLOW = "tbf rate 2mbit burst 16kb latency 400ms"
"""Of either direction of a slow link: packets wait so long at most, and are lost then."""
_DROP_ALL = ("protocol", "all", "bpf", "da", "bytecode", "1,6 0 0 2")
"""A filter of `tc` whose one instruction returns TC_ACT_SHOT."""
_DROP_PORTS = (
    "40 0 0 12,"  # the protocol of the Ethernet frame
    "21 0 7 2048,"  # if it is not IPv4: pass
    "48 0 0 23,"  # the protocol of the packet
    "21 0 5 6,"  # if it is not TCP: pass
    "177 0 0 14,"  # the length of the packet's header
    "72 0 0 16,"  # the port to which it goes
    "53 0 2 {first},"  # if it is lower: pass
    "37 1 0 {last},"  # if it is higher: pass
    "6 0 0 2,6 0 0 0"
)
"""The same for what goes to a range of TCP ports."""
_SEEN_AS = {"from": "ingress", "to": "egress"}
"""The direction of a host's packets, at the machine's end of its link."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class HostsFailed(RuntimeError):
    """A command of `ip` or Ray that failed, or something that was left behind."""


def refusal() -> str | None:
    """Why this process may not make hosts; None: it may."""
    if not sys.platform.startswith("linux") or None in map(shutil.which, ("ip", "tc")):
        return "network namespaces need Linux and the commands `ip` and `tc`"
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


class Hosts:
    """So many hosts, numbered from 0, each with a Ray node; host 0 has Ray's GCS. Use as a context
    manager; it leaves nothing behind."""

    def __init__(
        self, count: int = 2, cpus: int = 8, head_cpus: int | None = None, redis: str | None = None
    ) -> None:
        """`cpus`: of each node, as Ray counts them; `head_cpus`: of host 0, if others. `redis`: the
        server program that keeps the state of Ray's GCS."""
        pid = os.getpid()
        self._names = [f"swell-{pid}-{host}" for host in range(count)]
        self._subnet = f"10.{64 + pid % 64}.{pid // 64 % 256}"
        self._bridge = f"sw{pid}b"
        self._cpus = [cpus if head_cpus is None else head_cpus, *[cpus] * (count - 1)]
        self._redis_program = redis
        self._redis: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    @property
    def addresses(self) -> list[str]:
        return [f"{self._subnet}.{host + 1}" for host in range(len(self._names))]

    @property
    def ray_address(self) -> str:
        return f"{self.addresses[0]}:{_RAY_PORT}"

    @property
    def keeps_gcs(self) -> bool:
        """Whether the state of Ray's GCS outlives host 0."""
        return self._redis is not None

    def __enter__(self) -> Hosts:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        try:
            self._make_network()
            if self._redis_program is not None:
                self._start_redis(self._redis_program)
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """A Ray node on every host."""
        for host in range(len(self._names)):
            self.start_ray(host)

    def restart(self) -> None:
        """End every process of every host, and begin anew with an empty Ray."""
        for host in range(len(self._names)):
            self.lose(host)
        if self._redis is not None:
            self._stop_redis()
            self._start_redis(str(self._redis_program))
        for host in range(len(self._names)):
            self.boot(host)

    def __exit__(self, *_error: object) -> None:
        self.close()

    def prefix(self, host: int) -> list[str]:
        """The words before a command that is to run on this host."""
        # A Ray that this process had before has left its own mode in the environment.
        settings = [f"{_AUTH_MODE}={_NODE_SETTINGS[_AUTH_MODE]}"]
        return ["ip", "netns", "exec", self._names[host], "env", *settings]

    def cut(self, host: int) -> None:
        """Take the link of a host down, in both directions; connections are not reset."""
        _ip("link", "set", _link(host), "down")

    def drop(self, host: int, direction: Literal["from", "to"], ports: range | None = None) -> None:
        """Let every packet of one direction vanish, or only those that go to these TCP ports."""
        rule = _DROP_ALL
        if ports is not None:
            code = _DROP_PORTS.format(first=ports[0], last=ports[-1])
            rule = (*_DROP_ALL[:-1], f"{code.count(',') + 1},{code}")
        _tc("qdisc", "replace", "dev", _link(host), "clsact")
        _tc("filter", "add", "dev", _link(host), _SEEN_AS[direction], *rule)

    def slow(self, host: int) -> None:
        """Make the link slow in both directions, with a queue that overflows."""
        for namespace, link in ((), _link(host)), (("-n", self._names[host]), "eth0"):
            _tc(*namespace, "qdisc", "replace", "dev", link, "root", *_SLOW.split())

    @contextlib.contextmanager
    def folder_replaced(self, host: int, folder: Path, by: Path) -> Iterator[None]:
        """Let the Ray node of a host, and all that it starts, see another folder in this place.
        `ip netns exec` has given them mounts of their own."""
        node = ["nsenter", "--mount", f"--target={self.named(host, 'raylet/raylet')[0]}"]
        _run([*node, "mount", "--bind", str(by), str(folder)])
        try:
            yield
        finally:
            _run([*node, "umount", str(folder)])

    def heal(self, host: int) -> None:
        """Undo `cut`, `drop` and `slow`."""
        for words in (
            ("qdisc", "del", "dev", _link(host), "clsact"),
            ("qdisc", "del", "dev", _link(host), "root"),
            ("-n", self._names[host], "qdisc", "del", "dev", "eth0", "root"),
        ):
            with contextlib.suppress(HostsFailed):  # it has none
                _tc(*words)
        _ip("link", "set", _link(host), "up")

    def lose(self, host: int) -> None:
        """A loss of power: the link is gone, then every process at once, and no packet says so."""
        self.cut(host)
        self.kill(host)
        _ip("netns", "del", self._names[host])
        self._delete_link(host)

    def boot(self, host: int) -> None:
        """The host of `lose` again, with a Ray node and nothing that it had."""
        _clear(self._folder / str(host))
        self._make_host(host)
        self.start_ray(host)

    def is_up(self, host: int) -> bool:
        return Path("/run/netns", self._names[host]).exists()

    def pids(self, host: int) -> list[int]:
        """Every process of this host; none while it is lost."""
        if not self.is_up(host):
            return []
        namespace = os.stat(Path("/run/netns", self._names[host])).st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is gone
                if os.stat(folder / "ns" / "net").st_ino == namespace:
                    found.append(int(folder.name))
        return found

    def named(self, host: int, part: str) -> list[int]:
        """Living processes of this host whose title holds `part`."""
        return [pid for pid in self.pids(host) if alive(pid) and part in title(pid)]

    def kill(self, host: int) -> None:
        """End every process of this host at once, as a loss of power does."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def start_ray(self, host: int) -> None:
        role = ["--head", f"--port={_RAY_PORT}"] if host == 0 else [f"--address={self.ray_address}"]
        command = [
            *self.prefix(host),
            *(str(Path(sys.executable).with_name("ray")), "start", *role),
            f"--node-ip-address={self.addresses[host]}",
            f"--num-cpus={self._cpus[host]}",
            f"--temp-dir={self._folder / str(host)}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            "--include-dashboard=false",
        ]
        if host > 0:
            command.remove("--include-dashboard=false")
        with _settings(self._gcs_store()):
            _run(command)

    def _gcs_store(self) -> dict[str, str]:
        if self._redis is None:
            return {}
        return {
            "RAY_REDIS_ADDRESS": f"{self._subnet}.254:{_REDIS_PORT}",
            "RAY_external_storage_namespace": f"hosts-{os.getpid()}",
        }

    def _start_redis(self, program: str) -> None:
        address = f"{self._subnet}.254"
        words = ("--bind", address, "--port", str(_REDIS_PORT), "--save", "", "--appendonly", "no")
        self._redis = subprocess.Popen(
            [program, *words, "--protected-mode", "no"],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        _wait_until(lambda: _answers(address, _REDIS_PORT), lambda: f"{program} does not answer")

    def _stop_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None

    def close(self) -> None:
        """End every process and remove the network. Raises HostsFailed if something is left."""
        for host, name in enumerate(self._names):
            if self.is_up(host):
                self.kill(host)
                _ip("netns", "del", name)
            self._delete_link(host)
        self._stop_redis()
        if Path("/sys/class/net", self._bridge).exists():
            _ip("link", "del", self._bridge)
        _remove(self._folder)
        _wait_until(lambda: not self._left(), lambda: f"left behind: {self._left()}")

    def _make_network(self) -> None:
        for host, name in enumerate(self._names):
            reaper.run_at_the_end(["ip", "netns", "del", name])
            reaper.run_at_the_end(["ip", "link", "del", _link(host)])
        reaper.run_at_the_end(["ip", "link", "del", self._bridge])
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in range(len(self._names)):
            self._make_host(host)

    def _make_host(self, host: int) -> None:
        name, link = self._names[host], _link(host)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        # A host that comes back has the hardware address that it had.
        _ip("-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{host + 1:02x}")
        _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "via", f"{self._subnet}.254")

    def _delete_link(self, host: int) -> None:
        """A connection that is still being closed keeps its namespace for minutes, and the link
        with it."""
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
    """The machine's end of a host's link; the kernel allows 15 characters."""
    return f"sw{os.getpid()}-{host}"


def _remove(folder: Path) -> None:
    """What Ray left there, its logs among it."""
    if not os.environ.get("SWELL_KEEP_LOGS"):
        shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove it, or set it aside where logs are kept: Ray would read its own old address there."""
    _remove(folder)
    if folder.exists():
        folder.rename(tempfile.mkdtemp(prefix=f"{folder.name}-lost-", dir=folder.parent))


@contextlib.contextmanager
def _settings(more: Mapping[str, str]) -> Iterator[None]:
    """The environment of a Ray node: little CPU while it is idle, as `swell serve` has it."""
    before = dict(os.environ)
    ray_settings.set_defaults()
    os.environ.update(_NODE_SETTINGS, **more)
    for name in _PROXIES:  # gRPC would reach the other hosts through them
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _tc(*words: str) -> str:
    return _run(["tc", *words])


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _run(command: Sequence[str]) -> str:
    """Raises HostsFailed with the end of the output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        raise HostsFailed(f"{' '.join(command)}: no end after {_COMMAND_S:g} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise HostsFailed(f"{' '.join(command)}: " + " / ".join(lines))
    return done.stdout


def _wait_until(is_done: Callable[[], bool], problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + _VANISH_S
    while not is_done():
        if time.monotonic() > deadline:
            raise HostsFailed(problem())
        time.sleep(0.1)
