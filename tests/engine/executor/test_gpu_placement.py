"""Workers and GPUs, on a Ray that counts four GPUs although the machine has none."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import swell.worker.worker
from swell.cluster.control.plan.resources import bundles
from swell.configs.runtime.gpus import VISIBLE_GPUS, gpu_indices
from swell.configs.schema import Config, load
from swell.coordinator.transport.channel import ChannelAddress, make_keys
from swell.engine.executor import build_executor
from swell.engine.executor.host_shares import stage_order
from swell.worker.actor import WorkerActor
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

GPUS = 4


@pytest.fixture(scope="module")
def worker_kind() -> Iterator[Any]:
    """Starts Ray, whose processes see all GPUs of the host, and yields an actor with the arguments
    of a worker, which reports where it is."""
    folder = tempfile.mkdtemp(prefix="swell-test-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        patch.delenv(VISIBLE_GPUS, raising=False)
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=GPUS,
            include_dashboard=False,
            _temp_dir=folder,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    @ray.remote(num_cpus=0, max_restarts=0)
    class PlacedWorker:
        def __init__(self, _config: Config, rank: int, *_args: Any) -> None:
            self._rank = rank

        def place(self) -> tuple[int, list[int], dict[str, float]]:
            """Returns the rank, torch's indices of its GPUs, and how much it holds of each resource
            of its bundle."""
            gpus = gpu_indices(ray.get_gpu_ids(), os.environ.get(VISIBLE_GPUS))
            held = ray._private.worker.global_worker.core_worker.resource_ids()
            amounts = {name: sum(part for _, part in parts) for name, parts in held.items()}
            return self._rank, gpus, amounts

    yield PlacedWorker
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def config(**parts: Any) -> Config:
    keys = {key.replace("__", "."): value for key, value in parts.items()}
    return load("owner/name", {"model.device": "cuda", "parallel.executor": "ray", **keys})


@pytest.mark.parametrize(
    ("split", "engines"),
    [
        ({"parallel__tensor": 4}, 1),
        ({"parallel__tensor": 2, "parallel__pipeline": 2}, 1),
        ({"parallel__pipeline": 2}, 2),
        ({"cluster__gpus_per_worker": 0.5}, 8),
    ],
    ids=["tensor 4", "tensor 2, pipeline 2", "pipeline 2, data 2", "halves"],
)
def test_each_worker_has_a_gpu_of_its_own_from_the_bundle_of_its_stage(
    worker_kind: Any, monkeypatch: pytest.MonkeyPatch, split: dict[str, Any], engines: int
) -> None:
    monkeypatch.setattr("swell.engine.executor.ray.WorkerActor", worker_kind)
    engine = config(parallel__data=engines, **split)
    tensor, share = engine.parallel.tensor, engine.cluster.gpus_per_worker
    used: Counter[int] = Counter()
    groups, actors = [], []
    for _ in range(engines):
        bundle, count = bundles(engine)
        groups.append(group := placement_group([bundle] * count, strategy="PACK"))
        ray.get(group.ready(), timeout=HANG_S)
        executor: Any = build_executor(
            engine, placement_group=group, keys=make_keys(), host="127.0.0.1"
        )
        nodes = placement_group_table(group)["bundles_to_node_id"]
        order = stage_order(nodes)
        for rank in range(engine.parallel.world):
            own_bundle = order[rank // tensor]
            actors.append(actor := executor._create(rank, own_bundle, nodes[own_bundle]))
            found, gpus, resources = ray.get(actor.place.remote(), timeout=HANG_S)
            assert len(gpus) == 1, f"Ray has assigned rank {rank} the GPUs {gpus}"
            used[gpus[0]] += 1
            assert found == rank
            bundled = {name.rpartition("_")[0]: held for name, held in resources.items()}
            assert bundled[f"GPU_group_{own_bundle}"] == share, resources
        executor.shutdown()
    assert used == {gpu: round(1 / share) for gpu in range(GPUS)}
    for actor in actors:
        ray.kill(actor)
    for group in groups:
        remove_placement_group(group)


def test_a_worker_computes_on_the_gpu_that_ray_has_assigned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    class FoundWorker:
        def __init__(self, *_args: Any, gpu: int, **_options: Any) -> None:
            made.append(gpu)

        def load(self) -> int:
            return 1

    monkeypatch.setattr(swell.worker.worker, "Worker", FoundWorker)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: ["6"])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv(VISIBLE_GPUS, "4,6")
    actor = WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    nowhere = ChannelAddress("", "ipc:///nowhere", "tcp://127.0.0.1:1")
    made_actor = actor(config(), 0, 1, make_keys(), nowhere, nowhere)
    made_actor.load()
    assert made == [1]
