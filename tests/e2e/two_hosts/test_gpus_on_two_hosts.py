"""Workers and GPUs on two hosts. Ray counts four GPUs on each, although the machine has none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.hosts import hosts as hosts_module
from tests.faults.hosts.hosts import Hosts

pytestmark = pytest.mark.slow

GPUS = 4
Worker = dict[str, Any]


class Driver:
    """A process on the first host that starts workers (`tests/faults/gpu_placements.py`)."""

    def __init__(self, hosts: Hosts) -> None:
        script = [sys.executable, "-m", "tests.faults.gpu_placements", hosts.ray_address]
        self._process = subprocess.Popen(
            [*hosts.prefix(0), *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *command: object) -> list[Any]:
        stdin, stdout, stderr = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        assert stdin is not None and stdout is not None and stderr is not None
        stdin.write(" ".join(map(str, command)) + "\n")
        stdin.flush()
        while (line := stdout.readline()) and not line.startswith("["):
            """Skips messages of Ray."""
        assert line, stderr.read()[-3000:]
        found: list[Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := hosts_module.refusal():
        pytest.skip(reason)
    with Hosts(cpus=2, gpus=GPUS) as running:
        yield running


@pytest.fixture
def driver(hosts: Hosts) -> Iterator[Driver]:
    driver = Driver(hosts)
    yield driver
    driver.close()


def assert_placed(engines: list[list[Worker]], tensor: int, pipeline: int) -> None:
    """Asserts that each worker has one GPU of its own, that each stage is in one bundle on one
    host, and that the stages go from host to host in the order of the bundles."""
    used: Counter[tuple[str, int]] = Counter()
    for workers in engines:
        assert [worker["rank"] for worker in workers] == list(range(tensor * pipeline))
        for stage in range(pipeline):
            ranks = workers[stage * tensor : (stage + 1) * tensor]
            assert len({(worker["bundle"], worker["node"]) for worker in ranks}) == 1
        nodes = [worker["node"] for worker in workers[::tensor]]
        assert len(set(nodes)) == 1 + sum(a != b for a, b in pairwise(nodes))
        bundles = [worker["bundle"] for worker in workers[::tensor]]
        assert sorted(bundles) == list(range(pipeline))
        for node in set(nodes):
            here = [bundle for bundle, at in zip(bundles, nodes, strict=True) if at == node]
            assert here == sorted(here)
        for worker in workers:
            (gpu,) = worker["gpus"]
            assert gpu in range(GPUS)
            assert worker["indices"] == [0], "torch sees only this one"
            used[worker["node"], gpu] += 1
    assert set(used.values()) == {1}, used


def test_workers_on_two_hosts_have_gpus_of_their_own(hosts: Hosts, driver: Driver) -> None:
    """The workers of a host that is lost get GPUs of the host that takes its place, in the bundle
    of their stage; the others keep theirs."""
    for data, tensor, pipeline in ((2, 4, 1), (1, 2, 2), (2, 2, 2), (1, 4, 2)):
        engines = driver.call("place", data, tensor, pipeline)
        assert len(engines) == data
        assert_placed(engines, tensor, pipeline)
        if (tensor, pipeline) == (4, 2):
            break
        driver.call("end")
    assert len({worker["node"] for worker in engines[0]}) == 2, "an engine on both hosts"
    hosts.kill(1)
    driver.call("lost")
    hosts.start_ray(1)
    (replaced,) = driver.call("replace")
    assert len(replaced) == 4
    before = {worker["rank"]: worker for worker in engines[0]}
    for worker in replaced:
        assert worker["bundle"] == before[worker["rank"]]["bundle"]
        assert worker["node"] != before[worker["rank"]]["node"]
        before[worker["rank"]] = worker
    assert_placed([[before[rank] for rank in range(8)]], 4, 2)
