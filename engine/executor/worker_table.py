"""The workers of one engine as operators see them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from msgspec.structs import replace

from swell.coordinator.wire import WorkerStatus
from swell.engine.executor import WorkerInfo


class WorkerTable:
    """`workers` is replaced as a whole, so that any thread may read it."""

    def __init__(self, tensor: int, world: int) -> None:
        self.workers = tuple(
            WorkerInfo(rank, rank % tensor, rank // tensor, 0, WorkerStatus.LOADING)
            for rank in range(world)
        )

    def set_pid(self, rank: int, pid: int) -> None:
        self._change([rank], pid=pid)

    def set_ready(self, ranks: Collection[int]) -> None:
        self._change(ranks, status=WorkerStatus.READY)

    def set_lost(self, ranks: Collection[int]) -> None:
        self._change(ranks, status=WorkerStatus.LOST)

    def replace(self, ranks: Iterable[int]) -> None:
        """Lists successors of these workers: they load."""
        for rank in ranks:
            successors = self.workers[rank].replaced + 1
            self._change([rank], pid=0, status=WorkerStatus.LOADING, replaced=successors)

    def _change(self, ranks: Collection[int], **fields: Any) -> None:
        self.workers = tuple(
            replace(worker, **fields) if worker.rank in ranks else worker for worker in self.workers
        )
