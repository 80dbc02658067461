"""A law about what operators see: once nothing changes any more, the status of the cluster is
true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tests.simulator.actors import SimEngine, SimManager
from tests.simulator.control_plane import ControlPlane

_SETTLED = {"idle", "failed"}
"""Phases of a change of the number of engines that is over."""


class StatusReader:
    """Asks the manager for the body of `GET /admin/cluster`, and compares it with the processes."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.broken: list[str] = []
        """The untrue statements of the newest answer."""

    def read(self) -> None:
        """Must be called when the cluster is at rest. The answer is late if packets are."""
        manager, loop = self._plane.manager, self._plane.manager.process.loop
        self.broken = []

        async def read() -> None:
            body = await manager.manager.describe()
            self.broken = [*self._differences(manager, body)]

        self._plane.kernel.soon(manager.process, lambda: loop.create_task(read(), name="status"))

    def _differences(self, manager: SimManager, body: dict[str, Any]) -> Iterator[str]:
        plane, coordinator = self._plane, self._plane.coordinator
        if coordinator is None or manager is not plane.manager:
            return  # it is no longer at rest
        expected = {
            "epoch": coordinator.epoch,
            "state": "paused" if plane.operator.paused else "serving",
            "target": len(plane.living_engines),
            "coordinator": {"pid": plane.ray.pid_of(plane.coordinators[-1][0]), "error": None},
            "leftovers": None,
        }
        for name, value in expected.items():
            if body[name] != value:
                yield f"the status says {name}={body[name]!r}, and it is {value!r}"
        if body["rescale"]["phase"] not in _SETTLED or body["rescale"]["next_try_s"] is not None:
            yield f"the status says that a change is in progress: {body['rescale']}"
        if body["upgrade"]["version"] != manager.manager.upgrader.record.wanted:
            yield f"the status says that the upgrade is {body['upgrade']}"
        engines = {each["rank"]: each for each in body["engines"]}
        living = {engine.rank: self._status_of(engine) for engine in plane.living_engines}
        for rank in sorted({*engines, *living}):
            told, real = engines.get(rank, {}), living.get(rank, {})
            seen = {name: told.get(name) for name in real}
            if not real or seen != real:
                yield f"the status says {seen or told} of engine {rank}, and it is {real}"

    def _status_of(self, engine: SimEngine) -> dict[str, Any]:
        server = engine.server
        assert server is not None
        return {
            "state": "active",
            "version": engine.current_version,
            "pid": self._plane.ray.pid_of(engine.process),
            "node": engine.process.host,
            "workers": [
                msgspec.structs.asdict(worker) | {"status": worker.status.name.lower()}
                for worker in server.workers
            ],
        }
