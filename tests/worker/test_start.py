"""The start of a worker: what it measures, and when it captures its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

import swell.worker.worker
from swell.configs.parallel import ParallelConfig
from swell.configs.runtime import network
from swell.configs.schema import CacheConfig, load
from swell.worker.memory import kv_cache
from swell.worker.memory.gpu_memory import MemoryUse
from swell.worker.model_interfaces import moe_layers
from swell.worker.runner import ModelRunner
from swell.worker.wire import (
    CacheProgress,
    CaptureProgress,
    GroupPlan,
    StartMessage,
    WorkerProgress,
)
from swell.worker.worker import Worker
from tests.worker import tiny_models
from tests.worker.fixed_graphs import FixedGraphs

GPU = torch.device("cuda", 0)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Returns the runners that have captured their steps, so far."""
    runners: list[ModelRunner] = []
    monkeypatch.setattr(
        ModelRunner, "capture_steps", lambda runner, _on_progress: runners.append(runner)
    )
    return runners


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make_worker(
        family: str, progress: Callable[[StartMessage], None] = lambda _: None, **parallel: object
    ) -> Worker:
        tiny_models.make(tmp_path, family)
        source = {
            "model": {"path": str(tmp_path), "device": "cpu", "cpu_threads": 1},
            "parallel": parallel,
            "cache": {"memory_bytes": 1_000_000, "offload_bytes": 500_000},
        }
        made.append(Worker(load(source), progress=progress))
        return made[-1]

    yield make_worker
    for worker in made:
        worker.shutdown()


def test_a_worker_of_a_new_engine_captures_with_its_cache(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    worker = make("llama")
    worker.load()
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    assert not captures
    worker.init_cache(limits.num_blocks, limits.max_model_len)
    assert captures == [worker.runner]
    worker.regroup(GroupPlan(2))
    assert len(captures) == 1, "later steps are captured when they occur"


def test_a_worker_reports_the_share_of_each_phase_of_its_start(
    make: Callable[..., Worker], fixed_graphs: FixedGraphs
) -> None:
    reports: list[StartMessage] = []
    worker = make("llama", reports.append)
    worker.load()
    read = [each for each in reports if isinstance(each, WorkerProgress)]
    first, *_, last = read
    assert first == WorkerProgress(0, 0, 0)
    assert last.done_bytes == last.total_bytes > 0 and last.tensor == last.total_tensors > 1
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    reports.clear()
    worker.init_cache(limits.num_blocks, limits.max_model_len, limits.offload_blocks)
    blocks, (in_memory, on_disk) = limits.num_blocks, limits.offload_blocks
    assert in_memory and not on_disk
    total = blocks + in_memory
    counts = 0, blocks, total
    assert reports[:3] == [CacheProgress(0, done, total) for done in counts]
    steps = len(fixed_graphs.captured) - 1  # the first one only reserves memory for all others
    assert steps > 1
    captured = [CaptureProgress(0, done, steps) for done in range(steps + 1)]
    assert reports[3:] == captured


def test_a_replacement_captures_with_its_groups(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    worker = make("llama")
    worker.load()
    worker.init_cache(8, 64)
    assert not captures, "a step may contain operations of groups"
    worker.regroup(GroupPlan(7))
    assert captures == [worker.runner]


def test_a_replacement_captures_nothing_that_its_peers_do_not_capture(
    make: Callable[..., Worker],
    captures: list[ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture computes the operations of its groups, in which the peers take no part."""
    monkeypatch.setattr(ParallelConfig, "world", 2)
    worker = make("llama")
    worker.load()
    worker.init_cache(8, 64)
    worker.regroup(GroupPlan(7))
    assert not captures


def test_experts_are_placed_when_the_cache_has_its_memory(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    """An engine that shares experts does not know the other engines yet when it starts, so it would
    load all experts."""
    worker = make("mixtral", expert=True)
    worker.load()
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    worker.init_cache(limits.num_blocks, limits.max_model_len)
    layers = moe_layers(worker._built_model)
    assert layers and not any(list(layer.local_experts) for layer in layers)
    assert not captures
    worker.regroup(GroupPlan(2))
    assert all(list(layer.local_experts) for layer in layers)
    assert captures == [worker.runner]


@pytest.mark.parametrize(("memory_bytes", "share"), [(None, 1.0), (None, 0.5), (3_000_000, 1.0)])
def test_the_cache_of_a_gpu_has_what_the_largest_steps_leave(
    make: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    memory_bytes: int | None,
    share: float,
) -> None:
    """The worker computes on a CPU, and only measures a GPU. If the size of the cache is
    configured, nothing is measured."""
    worker = make("llama")
    worker.config = replace(
        worker.config,
        cache=CacheConfig(memory_bytes=memory_bytes),
        cluster=replace(worker.config.cluster, gpus_per_worker=share),
    )
    worker.load()
    worker.regroup(GroupPlan(1))
    ran: list[int | None] = []
    found = MemoryUse(10**9, 4 * 10**8, 5 * 10**8, 10**8, 2 * 10**8, 10**7)

    class FoundMemory:
        def __init__(self, device: torch.device, own_share: float) -> None:
            assert (device, own_share) == (GPU, share)

        def measure(self, profile: Callable[[], Iterator[int | None]]) -> MemoryUse:
            worker.device = torch.device("cpu")
            ran.extend(profile())
            worker.device = GPU
            return found

    monkeypatch.setattr(swell.worker.worker, "GpuMemory", FoundMemory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (5 * 10**8, 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    worker.device = GPU
    limits = worker.measure()
    worker.device = torch.device("cpu")
    block_bytes = kv_cache.bytes_per_block(
        worker._built_model.attention_layers(), 16, torch.float32
    )
    assert limits.num_blocks == (memory_bytes or found.cache_bytes) // block_bytes
    assert ran == ([] if memory_bytes else [0, 0, 0])


def test_a_worker_prepares_a_part_of_its_gpu_and_the_network_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is allocated and any group is formed."""
    fractions: list[tuple[float, torch.device]] = []
    properties = SimpleNamespace(total_memory=80 * 1024**3)
    for name, call in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda _device: properties,
        "set_per_process_memory_fraction": lambda *given: fractions.append(given),
    }.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(network, "addresses", lambda: [("eth0", "10.0.0.9"), ("eth1", "10.1.0.9")])
    monkeypatch.setenv(network.NCCL_INTERFACE, "eth0")
    config = load(
        {
            "model": {"path": "m", "device": "cuda"},
            "cluster": {"gpus_per_worker": 0.25, "interface": "eth1"},
        }
    )
    worker = Worker(config, gpu=1, host="10.1.0.9")
    assert worker.device == torch.device("cuda", 1)
    assert os.environ[network.NCCL_INTERFACE] == "=eth1"
    [(fraction, device)] = fractions
    assert device == worker.device and 0.2 < fraction < 0.25
