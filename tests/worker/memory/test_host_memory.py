"""Memory that is allocated when it is written, and that other workers know of before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swell.configs.runtime.promised_memory import promised_by
from swell.configs.schema import load
from swell.worker.memory import host_memory
from swell.worker.wire import GroupPlan
from swell.worker.worker import Worker
from tests.worker import tiny_models

CPU = torch.device("cpu")
MIB = 2**20
ME = Path("/proc/self")


@pytest.fixture(autouse=True)
def others() -> int:
    """The bytes that this process had announced before the test."""
    gc.collect()
    return promised_by(ME)


def resident_bytes() -> int:
    return int((ME / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_tensors_are_zeros_of_their_shapes_and_types() -> None:
    shapes = [(3, 5), (0, 4), (7,), (2, 1, 33)]
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        found = host_memory.zeros(shapes, dtype, CPU)
        assert [tuple(each.shape) for each in found] == shapes
        for number, each in enumerate(found):
            assert each.dtype == dtype and each.is_contiguous() and not each.any()
            each.fill_(number + 1)
        assert [set(each.flatten().tolist()) for each in found] == [{1}, set(), {3}, {4}]
    assert host_memory.zeros([(0, 4)], torch.float32, CPU)[0].shape == (0, 4)


def test_memory_counts_as_promised_until_it_is_written_or_freed(others: int) -> None:
    before_bytes = resident_bytes()
    (tensor,) = host_memory.zeros([(64, MIB)], torch.uint8, CPU)
    assert promised_by(ME) - others == 64 * MIB
    assert resident_bytes() - before_bytes < 10 * MIB
    tensor[:40].fill_(1)
    # Huge pages round up.
    assert 20 * MIB <= promised_by(ME) - others <= 24 * MIB
    part = tensor[:1]
    del tensor
    assert promised_by(ME) - others >= 20 * MIB, "a view keeps the memory"
    del part
    assert promised_by(ME) == others


def test_other_processes_know_of_the_memory_until_its_process_ends() -> None:
    program = """
import sys, torch
from swell.worker.memory.host_memory import zeros
kept = zeros([(48, 2**20)], torch.uint8, torch.device("cpu"))
print("mapped", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "mapped\n"
        folder = Path("/proc") / str(process.pid)
        assert promised_by(folder) == 48 * MIB
        process.kill()
        process.wait()
        assert promised_by(folder) == 0


def test_an_amount_that_the_system_refuses_is_an_error() -> None:
    with pytest.raises(MemoryError, match=r"refuses \d+ bytes .*cache.memory_bytes"):
        host_memory.zeros([(2**62,)], torch.uint8, CPU)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make_worker(family: str, model: dict[str, object], **cache: int) -> Worker:
        tiny_models.make(tmp_path, family)
        settings = {"path": str(tmp_path), "device": "cpu", "cpu_threads": 1, **model}
        source = {"model": settings, "cache": cache, "scheduler": {"max_rows": 4096}}
        made.append(Worker(load(source)))
        return made[-1]

    yield make_worker
    for worker in made:
        worker.shutdown()


@pytest.mark.parametrize(
    ("family", "model"), [("llama", {}), ("mixtral", {"routed_experts": True})]
)
def test_a_worker_starts_without_the_memory_of_its_caches(
    make: Callable[..., Worker], family: str, model: dict[str, object], others: int
) -> None:
    worker = make(family, model, memory_bytes=256 * MIB, offload_bytes=128 * MIB)
    worker.load()
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    before_bytes = resident_bytes()
    worker.init_cache(limits.num_blocks, limits.max_model_len, limits.offload_blocks)
    assert resident_bytes() - before_bytes < 10 * MIB
    assert promised_by(ME) - others > 370 * MIB
