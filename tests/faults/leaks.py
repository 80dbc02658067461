"""Resource leaks of growing and shrinking: 1 -> 3 -> 1, repeated, under load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swell.cluster.api.admin.protocol import ModelList
from swell.cluster.cli.http_client import Client
from tests.faults.cluster_monitor import ClusterMonitor, NotReached
from tests.faults.load import DECODE, Load, compare, make_requests, reference
from tests.faults.process import Cluster, ClusterFailed, title
from tests.faults.trial import RECOVER_S, Setup

SIZES = (3, 1)
_SHOWN = 4
"""The number of processes that the report names."""


class Usage(msgspec.Struct, frozen=True):
    """The resources of the processes that existed before the first cycle."""

    processes: int
    """All processes of the cluster."""
    files: int
    """Open file descriptors, including sockets."""
    threads: int
    resident_mib: dict[int, float]
    """The resident memory of each process."""

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.files} files, {self.threads} threads, "
            f"{sum(self.resident_mib.values()):.0f} MiB"
        )

    def growth(self, since: Usage) -> str:
        """Returns the processes whose memory has grown most since then."""
        grown = sorted(
            ((mib - since.resident_mib[pid], pid) for pid, mib in self.resident_mib.items()),
            reverse=True,
        )
        return ", ".join(f"{_name(pid)} {mib:+.0f} MiB" for mib, pid in grown[:_SHOWN])


def measure(cluster: Cluster, initial_pids: set[int]) -> Usage:
    files = threads = 0
    resident = {}
    for pid in initial_pids:
        files += len(os.listdir(f"/proc/{pid}/fd"))
        threads += len(os.listdir(f"/proc/{pid}/task"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        resident[pid] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Usage(len(_ours(cluster)), files, threads, resident)


def _name(pid: int) -> str:
    """Returns the last word of the command line that is a file or a name."""
    words = [word for word in title(pid).split() if not word.startswith("-")]
    return Path(next((word for word in words if word.endswith(".py")), words[0])).name


def cycles(setup: Setup, count: int, streams: int) -> Iterator[Usage]:
    """Yields the usage before and after each cycle. Raises ClusterFailed if a size is not reached,
    or if an answer fails or is wrong meanwhile."""
    with Cluster(setup.config, *setup.settings, "parallel.data=1") as cluster:
        monitor = ClusterMonitor(cluster)
        cluster.wait_idle()
        initial_pids = _ours(cluster)
        yield measure(cluster, initial_pids)
        for _ in range(count):
            asyncio.run(_cycle(cluster, monitor, streams))
            cluster.wait_idle()
            yield measure(cluster, initial_pids)


def _ours(cluster: Cluster) -> set[int]:
    """Returns the processes of the cluster, without the idle ones that Ray keeps ready."""
    return {pid for pid in cluster.members() if "ray::IDLE" not in title(pid)}


async def _cycle(cluster: Cluster, monitor: ClusterMonitor, streams: int) -> None:
    model = (await Client(cluster.url).get("/v1/models", ModelList)).data[0].id
    requests = make_requests(model, streams, DECODE, 0)
    expected = await reference(cluster.url, requests)
    load = Load([cluster.url], requests, streams)
    load.start()
    try:
        for size in SIZES:
            await monitor.post("/admin/scale", {"engines": size, "drain_timeout_s": 0})
            await monitor.until_whole({size}, RECOVER_S)
    except NotReached as error:
        raise ClusterFailed(str(error)) from None
    result = compare(expected, await load.finish())
    if result.failed or result.wrong or result.cut:
        raise ClusterFailed(f"answers suffered: {result}")
