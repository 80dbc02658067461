"""What growing and shrinking leaves behind: 1 -> 3 -> 1, again and again, under a light load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swell.cluster.client import Client
from swell.cluster.faults.load import DECODE, Load, compare, make_asks, reference
from swell.cluster.faults.process import Cluster, ClusterFailed, title
from swell.cluster.faults.trial import RECOVER_S, Setup
from swell.cluster.faults.watch import Missed, Watch
from swell.cluster.openai.responses import ModelList

SIZES = (3, 1)
STREAMS = 2


class Usage(msgspec.Struct, frozen=True):
    """What the processes hold that were there before the first cycle."""

    processes: int
    """All of the cluster."""
    files: int
    """Open descriptors, sockets among them."""
    threads: int
    resident_mib: float

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.files} files, {self.threads} threads, "
            f"{self.resident_mib:.0f} MiB"
        )


def measure(cluster: Cluster, veterans: set[int]) -> Usage:
    files = threads = pages = 0
    for pid in veterans:
        files += len(os.listdir(f"/proc/{pid}/fd"))
        threads += len(os.listdir(f"/proc/{pid}/task"))
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Usage(len(_ours(cluster)), files, threads, mib)


def cycles(setup: Setup, count: int) -> Iterator[Usage]:
    """The usage before and after each cycle. Raises ClusterFailed if a size is not reached, or if
    an answer fails or is wrong meanwhile."""
    with Cluster(setup.config, *setup.settings, "parallel.data=1") as cluster:
        watch = Watch(cluster)
        cluster.wait_idle()
        veterans = _ours(cluster)
        yield measure(cluster, veterans)
        for _ in range(count):
            asyncio.run(_cycle(cluster, watch))
            cluster.wait_idle()
            yield measure(cluster, veterans)


def _ours(cluster: Cluster) -> set[int]:
    """Its processes, without those that Ray keeps ready for whoever comes next."""
    return {pid for pid in cluster.members() if "ray::IDLE" not in title(pid)}


async def _cycle(cluster: Cluster, watch: Watch) -> None:
    model = (await Client(cluster.url).get("/v1/models", ModelList)).data[0].id
    asks = make_asks(model, STREAMS, DECODE, 0)
    expected = await reference(cluster.url, asks)
    load = Load([cluster.url], asks, STREAMS)
    load.start()
    try:
        for size in SIZES:
            await watch.ask("/admin/scale", {"engines": size, "drain_timeout_s": 0})
            await watch.until_whole({size}, RECOVER_S)
    except Missed as missed:
        raise ClusterFailed(str(missed)) from None
    verdict = compare(expected, await load.finish())
    if verdict.failed or verdict.wrong or verdict.cut:
        raise ClusterFailed(f"answers suffered: {verdict}")
