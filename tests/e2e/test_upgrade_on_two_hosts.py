"""A cluster over two hosts gets other weights under 32 streams: none fails, none mixes versions."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_two_hosts import ONE_WORKER_A_HOST, TwoHostCluster, hosts, serving
from tests.e2e.test_upgrade import SETTINGS, add_noise, answers_while, assert_pure, copy_of, upgrade

__all__ = ["hosts"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 32
ENGINES = 2
"""There is room for one on each host: each is replaced in its place, and its answers move to the
other host meanwhile, as long as an engine of their version is there."""


@pytest.fixture
def models() -> Iterator[tuple[Path, Path]]:
    """At one path on every host."""
    with tempfile.TemporaryDirectory(prefix="swell-models-") as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        yield copy_of(first), copy_of(second, lambda tensors: add_noise(tensors, 2))


def test_other_weights_under_32_streams_over_two_hosts(hosts, models: tuple[Path, Path]) -> None:
    first, second = models
    with serving(hosts, first, *SETTINGS, ONE_WORKER_A_HOST, engines=ENGINES) as cluster:
        assert sorted(hosts_of(cluster)) == [0, 1]

        def change() -> None:
            done = upgrade(cluster.urls[1], second, prefix=hosts.prefix(0))
            assert done.returncode == 0, done.stdout + done.stderr

        assert_pure(*asyncio.run(answers_while(cluster.urls, STREAMS, change)))
        assert sorted(hosts_of(cluster)) == [0, 1]
        state = cluster.get("/admin/cluster").json()
        assert {engine["version"] for engine in state["engines"]} == {state["upgrade"]["version"]}
        assert len(state["engines"]) == ENGINES and state["upgrade"]["model"] == str(second)


def hosts_of(cluster: TwoHostCluster) -> list[int]:
    return [cluster.host_of(engine["pid"]) for engine in cluster.engines()]
