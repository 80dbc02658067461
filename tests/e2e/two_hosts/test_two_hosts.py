"""One cluster on two hosts, each with its own address and link: the answers equal the reference,
while engines start and stop on the other host, and while a link is down.

Every node has two CPUs; `cluster.cpus_per_worker` determines how many workers fit on it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.e2e.test_upgrade import SETTINGS as UPGRADE_SETTINGS
from tests.e2e.test_upgrade import answers_while as answers_of_versions
from tests.e2e.test_upgrade import assert_pure, upgrade
from tests.faults.cluster_monitor import INGRESS, MANAGER
from tests.faults.hosts import hosts as hosts_module
from tests.faults.hosts.hosts import Hosts
from tests.faults.hosts.namespaces import wait_until
from tests.faults.load import SHORT_DECODE, Answer, Load, compare, make_requests, reference
from tests.faults.process import HTTP
from tests.support.deadlines import HANG_S
from tests.support.weights.changed_weights import add_noise, copy_of

pytestmark = pytest.mark.slow

MOE = NANO.parent / "nano-moe"
STREAMS = 12
UPGRADE_STREAMS = 32
BURST_EVERY_S = 1.5
STALL_S = 3.0
"""`cluster.stall_timeout_s` if links are cut. Other tests have the longer default, since forming a
group takes long on a busy machine."""
CUT_S = 4 * STALL_S
"""Three health checks of Ray Serve would fail in this time if their timeout were not longer."""
ONE_WORKER_A_HOST = "cluster.cpus_per_worker=2"
TWO_WORKERS_A_HOST = "cluster.cpus_per_worker=1"
SECOND_NETWORK = "172.31.99.0/24"
SECOND = ("172.31.99.1", "172.31.99.2")
"""Second addresses of the hosts, which Ray does not know."""
PORTS = range(29_000, 29_064)
PORTS_OF_RAY = range(10_002, 20_000)
"""Ports of Ray's own sockets, by default, also in the processes of Swell's actors."""
PORTS_OF = {
    "EngineActor": (3, PORTS[len(PORTS) // 4 :]),
    "WorkerActor": (1, PORTS[len(PORTS) // 4 :]),
    "Coordinator": (1, PORTS[: len(PORTS) // 8]),
}
"""Process -> the number of ports that it may use in the range, and the part of the range. An engine
has an inbox and two sockets for its workers; its first worker has the store. The kernel chooses the
ports of gloo."""
LISTENS = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := hosts_module.refusal():
        pytest.skip(reason)
    with Hosts(cpus=2) as running:
        yield running


@contextmanager
def serving(
    hosts: Hosts, model: object, *settings: str, engines: int = 1
) -> Iterator[TwoHostCluster]:
    """A cluster on the Ray of the hosts, started on the first host, with an ingress on each. Waits
    until all engines serve. Afterwards no process of it may remain."""
    cluster = Cluster(
        str(model),
        "model.dtype=float32",
        f"parallel.data={engines}",
        *settings,
        prefix=hosts.prefix(0),
        options=["--address", hosts.ray_address, "--host", "0.0.0.0"],
    )
    with cluster:
        running = TwoHostCluster(hosts, cluster)
        asyncio.run(running.wait_until_whole(engines))
        yield running

    def remaining() -> list[int]:
        parts = ("EngineActor", "WorkerActor", "Coordinator", MANAGER, INGRESS)
        return [pid for host in (0, 1) for part in parts for pid in hosts.named(host, part)]

    wait_until(lambda: not remaining(), lambda: f"left behind: {remaining()}")


class TwoHostCluster:
    def __init__(self, hosts: Hosts, cluster: Cluster) -> None:
        self.hosts = hosts
        port = urlsplit(cluster.url).port
        self.urls = [f"http://{address}:{port}" for address in hosts.addresses]

    def get(self, path: str, host: int = 0) -> httpx.Response:
        return HTTP.get(self.urls[host] + path, timeout=HANG_S)

    def scale(self, engines: int) -> None:
        body = {"engines": engines}
        HTTP.post(self.urls[0] + "/admin/scale", json=body, timeout=HANG_S)

    def engines(self) -> list[dict]:
        return self.get("/admin/cluster").json()["engines"]

    def ingresses(self) -> list[list[int]]:
        """Returns the pids of the ingresses of each host."""
        return [self.hosts.named(host, INGRESS) for host in (0, 1)]

    def host_of(self, pid: int) -> int:
        (host,) = [host for host in (0, 1) if pid in self.hosts.pids(host)]
        return host

    def worker_hosts(self) -> list[list[int]]:
        """Returns the host of each worker, by engine, in the order of their ranks."""
        return [
            [self.host_of(worker["pid"]) for worker in engine["workers"]]
            for engine in self.engines()
        ]

    def is_whole(self, engines: int) -> bool:
        """Whether this many engines serve, no change is going on, and both ingresses are ready."""
        state = self.get("/admin/cluster").json()
        active = [engine["state"] == "active" for engine in state["engines"]]
        idle = state["rescale"]["phase"] == "idle" and state["state"] == "serving"
        ready = all(self.get("/ready", host).status_code == 200 for host in (0, 1))
        return active == [True] * engines and idle and ready

    async def wait_until_whole(self, engines: int) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                if await asyncio.to_thread(self.is_whole, engines):
                    return
            except (httpx.TransportError, ValueError, KeyError):
                pass
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not whole after {HANG_S:g} s: {self.get('/admin/cluster').text}; "
                    f"{[self.get('/ready', host).text for host in (0, 1)]}"
                )
            await asyncio.sleep(0.2)


async def answers_while(
    cluster: TwoHostCluster, urls: Sequence[str], change: Callable
) -> tuple[list[Answer], list[Answer]]:
    """Returns the reference answers, and the answers of streams that ran during `change`."""
    requests = make_requests((await model_of(cluster)), STREAMS, SHORT_DECODE, seed=7)
    expected = await reference(cluster.urls[0], requests)
    load = Load(urls, requests, STREAMS, BURST_EVERY_S)
    load.start()
    while load.streaming < STREAMS // 3:
        await asyncio.sleep(0.02)
    await change()
    return expected, await load.finish()


async def model_of(cluster: TwoHostCluster) -> str:
    return (await asyncio.to_thread(cluster.get, "/v1/models")).json()["data"][0]["id"]


def assert_kept(expected: list[Answer], answers: list[Answer]) -> None:
    result = compare(expected, answers)
    assert result.failed == result.wrong == result.cut == 0, result
    assert result.answers >= STREAMS


async def some_seconds() -> None:
    await asyncio.sleep(3)


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.slow_variants)])
def test_engines_on_two_hosts_keep_their_streams_while_a_link_is_down(hosts, host: int):
    """Cuts the link of a host. Clients of the other host's ingress only see a pause, and no ingress
    is replaced, although Ray Serve's controller cannot reach one of the hosts. If the first host is
    cut off, the other ingress loses Ray's GCS as well."""
    settings = (ONE_WORKER_A_HOST, f"cluster.stall_timeout_s={STALL_S}")
    with serving(hosts, NANO, *settings, engines=2) as cluster:
        assert sorted(cluster.worker_hosts()) == [[0], [1]]
        kept = asyncio.run(answers_while(cluster, cluster.urls, some_seconds))
        assert_kept(*kept)
        served = {answer.engines for answer in kept[1]}
        assert served >= {"0", "1"}
        change = partial(cut_and_heal, cluster, host)
        ingresses = cluster.ingresses()
        assert_kept(*asyncio.run(answers_while(cluster, [cluster.urls[1 - host]], change)))
        asyncio.run(cluster.wait_until_whole(2))
        assert sorted(cluster.worker_hosts()) == [[0], [1]]
        assert cluster.ingresses() == ingresses


@pytest.fixture
def models() -> Iterator[tuple[Path, Path]]:
    """Folders of two models, which have the same path on every host."""
    with tempfile.TemporaryDirectory(prefix="swell-models-") as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        yield copy_of(first), copy_of(second, lambda tensors: add_noise(tensors, 2))


@pytest.mark.slow_variants
def test_an_upgrade_replaces_engines_in_their_places(hosts, models: tuple[Path, Path]):
    """Upgrades the weights under many streams: none fails and none mixes versions. Each host has
    room for one engine, so each engine is replaced in its place. Meanwhile its answers move to the
    other host, if that has an engine of their version. `test_upgrade.py` has room."""
    first, second = models
    with serving(hosts, first, *UPGRADE_SETTINGS, ONE_WORKER_A_HOST, engines=2) as cluster:

        def change() -> None:
            done = upgrade(cluster.urls[1], second, prefix=cluster.hosts.prefix(0))
            assert done.returncode == 0, done.stdout + done.stderr

        assert_pure(*asyncio.run(answers_of_versions(cluster.urls, UPGRADE_STREAMS, change)))
        assert sorted(cluster.worker_hosts()) == [[0], [1]]
        state = cluster.get("/admin/cluster").json()
    assert {engine["version"] for engine in state["engines"]} == {state["upgrade"]["version"]}
    assert state["upgrade"]["model"] == str(second)


async def cut_and_heal(cluster: TwoHostCluster, host: int) -> None:
    """Cuts the link until each side considers the other side's engine lost, then restores it."""
    cluster.hosts.cut(host)
    await asyncio.sleep(CUT_S)
    cluster.hosts.heal(host)
    await cluster.wait_until_whole(2)
    await some_seconds()


@pytest.mark.slow_variants
def test_the_stages_of_a_pipeline_on_two_hosts(hosts):
    """The engines below that share experts connect workers of two hosts in the same way."""
    with serving(hosts, NANO, "parallel.pipeline=2", ONE_WORKER_A_HOST) as cluster:
        assert sorted(cluster.worker_hosts()[0]) == [0, 1]
        assert_kept(*asyncio.run(answers_while(cluster, cluster.urls, some_seconds)))


def test_engines_that_share_experts_join_and_leave_on_the_other_host(hosts):
    """Checks that the tensor-parallel ranks of an engine share a host, and that all processes only
    listen at the configured interface and port range. The host name resolves to none of these
    addresses."""
    for host in (0, 1):
        subprocess.run(
            [*hosts.prefix(host), *f"ip addr add {SECOND[host]}/24 dev eth0".split()], check=True
        )
    settings = (f"cluster.interface={SECOND_NETWORK}", f"cluster.ports={PORTS[0]}-{PORTS[-1]}")
    split = ("parallel.tensor=2", "parallel.expert=true", TWO_WORKERS_A_HOST)
    with serving(hosts, MOE, *split, *settings) as cluster:

        async def grow_and_shrink() -> None:
            for engines in (2, 1):
                await asyncio.to_thread(cluster.scale, engines)
                await cluster.wait_until_whole(engines)
                found = await asyncio.to_thread(cluster.worker_hosts)
                assert sorted(found) == [[0, 0], [1, 1]] if engines == 2 else len(found) == 1
                if engines == 2:
                    await asyncio.to_thread(assert_listeners, hosts)
                await some_seconds()

        assert_kept(*asyncio.run(answers_while(cluster, cluster.urls, grow_and_shrink)))


def assert_listeners(hosts: Hosts) -> None:
    for host in (0, 1):
        found = {part: [listeners_of(pid) for pid in hosts.named(host, part)] for part in PORTS_OF}
        for part, (num_ports, ports) in PORTS_OF.items():
            for listeners in found[part]:
                assert {address for address, _ in listeners} <= {SECOND[host]}, found
                taken = {port for _, port in listeners if port in PORTS}
                assert len(taken) <= num_ports and taken <= {*ports}, found
        assert any(found["EngineActor"]) and any(found["WorkerActor"]), found


def listeners_of(pid: int) -> set[tuple[str, int]]:
    """Returns the TCP addresses at which a process listens, without the ports of Ray."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(path))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == LISTENS and f"socket:[{inode}]" in sockets:
                number, _, port = local.partition(":")
                words = (number[at : at + 8] for at in range(0, len(number), 8))
                address = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found.add((socket.inet_ntop(family, address), int(port, 16)))
    return {listener for listener in found if listener[1] not in PORTS_OF_RAY}
