"""Runs the contract tests of Ray with the simulated Ray, on the virtual clock, with small
actors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.cluster.control.ray.contract_cluster import OTHER_HOST
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.network import Network
from tests.simulator.simulated_ray.ray import SimRayCluster
from tests.simulator.simulated_ray.ray_interface import SimRay

_LIMIT_S = 10_000.0


class SimRayWorld:
    """Implements `World` of `tests/cluster/control/ray/test_ray_contract.py`."""

    num_cpus = 4.0

    def __init__(self) -> None:
        self._kernel = Kernel(0)
        net = Network(self._kernel)
        self._notes: list[str] = []
        self._cluster = SimRayCluster(
            self._kernel, net, {"host0": {"CPU": self.num_cpus}}, self._probe, self._probe
        )
        self._process = Process(self._kernel, "manager", "host0")
        self.ray = SimRay(self._cluster, self._process)

    def _probe(self, process: Process, _again: bool, *arguments: object) -> Any:
        return Probe(self._cluster.pid_of(process), self._notes, arguments)

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            tasks.append(self._process.loop.create_task(scenario))
            tasks[0].add_done_callback(lambda _: self._kernel.halt())

        self._kernel.soon(self._process, start)
        assert self._kernel.run(self._kernel.now + _LIMIT_S), "it does not end"
        tasks[0].result()
        assert self._kernel.failures == []

    def notes(self) -> list[str]:
        return self._notes

    def stop_process(self, pid: int) -> None:
        self._cluster.processes[pid].stop()

    def continue_process(self, pid: int) -> None:
        self._cluster.processes[pid].resume()

    def process_lives(self, pid: int) -> bool:
        return self._cluster.processes[pid].alive

    def add_host(self) -> str:
        self._cluster.restore_host("host1", {OTHER_HOST: 1.0})
        return "host1"

    def close(self) -> None:
        self._process.close()


class Probe:
    """The small actor of the contract tests."""

    def __init__(self, pid: int, notes: list[str], arguments: tuple[object, ...]) -> None:
        self._pid, self._notes, self._arguments = pid, notes, arguments

    def arguments(self) -> tuple[object, ...]:
        return self._arguments

    def pid(self) -> int:
        return self._pid

    def fail(self, text: str) -> None:
        raise LookupError(text)

    async def note(self, text: str, wait_s: float) -> int:
        known = text in self._notes
        self._notes.append(text)
        await asyncio.sleep(0.0 if known else wait_s)
        return self._pid

    async def ended(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
