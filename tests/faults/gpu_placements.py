"""Places the workers of engines on the GPUs that a Ray counts, and prints where they are.

Run in the network of a host as `python -m tests.faults.gpu_placements ADDRESS`, with the address of
a Ray. It reads one line for each command, and prints one line of JSON for each result:

    place DATA TENSOR PIPELINE   starts engines, and prints their workers
    lost                         prints an empty list when Ray has noticed that a host is gone
    replace                      replaces the workers of the lost host; prints them
    end                          stops all engines, and prints an empty list
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from swell.cluster.control.plan.resources import bundles
from swell.configs.runtime.gpus import VISIBLE_GPUS, gpu_indices
from swell.configs.schema import Config, load
from swell.coordinator.transport.channel import make_keys
from swell.engine.executor import ray as ray_executor
from swell.engine.executor.ray import RayExecutor
from tests.support.deadlines import HANG_S


class Placed(Exception):
    """Raised when the workers of an engine exist, where their start ends."""


class PlacingExecutor(RayExecutor):
    """Creates its workers, and loads nothing."""

    def _load(self, *_args: Any) -> None:
        raise Placed

    def place(self, ranks: list[int]) -> list[dict[str, Any]]:
        """Creates these workers. Returns rank, bundle, node, the ids of the GPUs of each, and
        their indices in torch."""
        try:
            self._start_workers(ranks, lambda text: None)
        except Placed:
            workers = [self._workers[rank] for rank in ranks]
            places = [each.actor.place.remote() for each in workers]
            found: list[dict[str, Any]] = ray.get(places, timeout=HANG_S)
            return found
        raise AssertionError("the workers were loaded")


def placed_worker() -> Any:
    """Returns an actor with the arguments of a worker, which reports where it is."""

    @ray.remote(num_cpus=0, max_restarts=0)
    class PlacedWorker:
        def __init__(self, _config: Config, rank: int, *_args: Any) -> None:
            self._rank = rank

        def place(self) -> dict[str, Any]:
            held = ray._private.worker.global_worker.core_worker.resource_ids()
            bundled = [name for name in held if name.startswith("GPU_group_")]
            numbers = [name.split("_")[2] for name in bundled if name.count("_") == 3]
            return {
                "rank": self._rank,
                "bundle": int(numbers[0]) if numbers else None,
                "node": ray.get_runtime_context().get_node_id(),
                "gpus": [int(gpu) for gpu in ray.get_gpu_ids()],
                "indices": gpu_indices(ray.get_gpu_ids(), os.environ.get(VISIBLE_GPUS)),
            }

    return PlacedWorker


class Engines:
    def __init__(self) -> None:
        self._executors: list[PlacingExecutor] = []
        self._groups: list[Any] = []

    def place(self, data: int, tensor: int, pipeline: int) -> list[Any]:
        settings = {"data": data, "tensor": tensor, "pipeline": pipeline, "executor": "ray"}
        keys = {f"parallel.{key}": value for key, value in settings.items()}
        config = load("owner/name", {"model.device": "cuda", **keys})
        found = []
        for _ in range(data):
            bundle, count = bundles(config)
            self._groups.append(group := placement_group([bundle] * count, strategy="PACK"))
            ray.get(group.ready(), timeout=HANG_S)
            host = ray.util.get_node_ip_address()
            executor = PlacingExecutor(config, placement_group=group, keys=make_keys(), host=host)
            self._executors.append(executor)
            found.append(executor.place(list(range(config.parallel.world))))
        return found

    def lost(self) -> list[Any]:
        wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
        return []

    def replace(self) -> list[Any]:
        found = []
        for executor, group in zip(self._executors, self._groups, strict=True):
            ray.get(group.ready(), timeout=HANG_S)
            wait_for(lambda group=group: placement_group_table(group)["state"] == "CREATED")
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            workers = executor._workers.items()
            lost = [rank for rank, worker in workers if worker.node not in alive]
            found.append(executor.place(lost))
        return found

    def end(self) -> list[Any]:
        for executor in self._executors:
            executor.shutdown()
        for group in self._groups:
            remove_placement_group(group)
        self._executors, self._groups = [], []
        return []


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


def main(address: str) -> None:
    ray.init(address, log_to_driver=False)
    vars(ray_executor)["WorkerActor"] = placed_worker()
    engines = Engines()
    for line in sys.stdin:
        command, *numbers = line.split()
        result = getattr(engines, command)(*map(int, numbers))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
