"""KV blocks that real workers offloaded come back as they were computed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from swell.cluster.local import LLM, SamplingParams
from swell.configs.schema import load
from swell.engine.kv.offload_tiers import OffloadTiers
from swell.worker.layers.attention import Attention
from swell.worker.memory import offload_store
from swell.worker.memory.offload_store import (
    OffloadStore,
    batches_of,
    count_offload_blocks,
    runs_of,
)
from swell.worker.wire import BlockCopy
from tests.support.device import on_device
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

BLOCKS_11 = 181_000
"""The bytes of 11 blocks of 8 tokens of the tiny llama."""
MEMORY = {"cache.offload_bytes": 1_000_000}
DISK = {"cache.offload_disk_bytes": 1_000_000}
BOTH = {"cache.offload_bytes": 100_000, "cache.offload_disk_bytes": 1_000_000}
SETUPS: dict[str, dict[str, Any]] = {
    "memory": MEMORY,
    "disk": DISK,
    "memory and disk": BOTH,
    "chunks": {**BOTH, "scheduler.max_tokens_per_step": 8, "scheduler.max_rows": 4},
    "three steps in flight": {**MEMORY, "scheduler.steps_in_flight": 3},
    "tensor": {**BOTH, "parallel.tensor": 2, "cache.memory_bytes": BLOCKS_11 // 2},
    "pipeline": {**BOTH, "parallel.pipeline": 2, "cache.memory_bytes": BLOCKS_11 // 2},
}
PARAMS = SamplingParams(temperature=1.2, seed=4, max_tokens=10, ignore_eos=True, logprobs=1)


def prompts() -> list[list[int]]:
    return [[(7 * i + 31 * k) % 300 + 3 for i in range(41)] for k in range(5)]


def make(folder: Path) -> None:
    tiny_models.make(folder, "llama")
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    """Runs one prompt after the other, so that each evicts the earlier ones."""
    found = []
    for one in prompts():
        (output,) = llm.generate([one], PARAMS)
        answer = output.outputs[0]
        found.append((list(answer.token_ids), answer.cumulative_logprob))
    return found


@pytest.mark.parametrize("setup", SETUPS)
def test_answers_equal_those_with_a_large_cache(tmp_path: Path, setup: str) -> None:
    make(tmp_path)
    split = {k: v for k, v in SETUPS[setup].items() if k.startswith("parallel")}
    small = {"cache.block_tokens": 8, "cache.memory_bytes": BLOCKS_11, **SETUPS[setup]}
    with LLM(str(tmp_path), **on_device({**split, "cache.memory_bytes": 1 << 23})) as llm:
        expected = answers(llm)
    with LLM(str(tmp_path), **on_device({**small, "cache.offload_folder": str(tmp_path)})) as llm:
        tiers = llm._engine.core.scheduler.kv.offload
        rounds = [answers(llm) for _ in range(3)]
        assert tiers.num_saved > 10 and tiers.num_loaded > 40
        assert not list(tmp_path.glob("swell-kv-*")), "the file has no name"
    for found in rounds:
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        for (_, one), (_, other) in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def layers_of(blocks: int) -> list[Attention]:
    layers = [Attention(2, heads, 4, 1.0) for heads in (1, 2)]
    for seed, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(seed)
        shape = (blocks, layer.kv_heads, 8, 4)
        layer.bind_cache(
            torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        )
    return layers


def caches(layers: list[Attention]) -> list[torch.Tensor]:
    return [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]


def contents(layers: list[Attention], block: int) -> list[torch.Tensor]:
    return [cache[block].clone() for cache in caches(layers)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_copies_run_in_order(tmp_path: Path) -> None:
    """Copies are made in order, also if a slot is written twice and read in between."""
    layers = layers_of(5)
    store = OffloadStore(caches(layers), (2, 2), str(tmp_path))
    before = [contents(layers, block) for block in range(5)]
    store.apply(
        [
            BlockCopy(0, 0, 1, 0),
            BlockCopy(0, 1, 1, 0),  # reuses the slot at once
            BlockCopy(0, 2, 1, 1),
            BlockCopy(1, 0, 2, 1),
            BlockCopy(0, 3, 1, 0),
            BlockCopy(2, 1, 0, 4),
            BlockCopy(1, 0, 0, 0),
            BlockCopy(1, 1, 0, 3),
        ]
    )
    assert same(contents(layers, 4), before[1])
    assert same(contents(layers, 0), before[3])
    assert same(contents(layers, 3), before[2])
    assert same(contents(layers, 1), before[1])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([4], [(4, 0, 1)]),
        ([4, 5, 6], [(4, 0, 3)]),
        ([1, 2, 5, 6, 7, 9], [(1, 0, 2), (5, 2, 5), (9, 5, 6)]),
        ([3, 3, 4], [(3, 0, 1), (3, 1, 3)]),  # one block may be copied to several blocks
    ],
)
def test_consecutive_blocks_are_one_copy(
    blocks: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert runs_of(blocks) == runs


def test_batches_have_the_result_of_the_copies_in_order() -> None:
    random = Random(3)
    for _ in range(300):
        sizes = [random.randrange(1, 9) for _ in range(3)]
        copies = []
        for _ in range(random.randrange(1, 40)):
            source, target = random.sample(range(3), 2)
            of, to = random.randrange(sizes[source]), random.randrange(sizes[target])
            copies.append(BlockCopy(source, of, target, to))
        before = [[(tier, block) for block in range(size)] for tier, size in enumerate(sizes)]
        in_order, in_batches = ([[*tier] for tier in before] for _ in range(2))
        for copy in copies:
            content = in_order[copy.source_tier][copy.source_block]
            in_order[copy.target_tier][copy.target_block] = content
        for batch in batches_of(copies):
            source, target = batch.tiers
            read = {to: in_batches[source][of] for to, of in batch.places.items()}
            for to, content in read.items():
                in_batches[target][to] = content
        assert in_batches == in_order


def test_evictions_from_a_full_tier_precede_writes() -> None:
    """With two full tiers, each saved block moves another one to the disk, and these moves come
    first."""
    tiers = OffloadTiers((4, 8))
    for block in range(12):
        tiers.save(block, b"%d" % block)
    tiers.take_copies()
    for block in range(4):
        tiers.save(block, b"new %d" % block)
    copies = tiers.take_copies()
    assert len(copies) == 8
    assert [batch.tiers for batch in batches_of(copies)] == [(1, 2), (0, 1)]


@pytest.mark.parametrize("staged", [1, 3, 7, 512])
def test_blocks_are_staged_on_a_device(staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are staged on a device as on a GPU; here all tensors are in host memory."""
    monkeypatch.setattr(offload_store, "_STAGED_BLOCKS", staged)
    random = Random(staged)
    for _ in range(50):
        count = random.randrange(1, 40)
        device = [torch.randn(64, 2, 4) for _ in range(3)]
        host = [torch.randn(80, 2, 4) for _ in range(3)]
        in_order = list(range(5, 5 + count))
        hosts = random.choice([random.sample(range(80), count), in_order, in_order[::-1]])
        devices = random.sample(range(64), count)
        saved, loaded = ([tensor.clone() for tensor in tier] for tier in (host, device))
        for kept, source in zip(saved, device, strict=True):
            kept[hosts] = source[devices]
        offload_store._save(device, host, list(zip(hosts, devices, strict=True)))
        assert same(host, saved)
        # one block may be loaded several times
        hosts = [random.randrange(80) for _ in range(count)]
        for kept, source in zip(loaded, host, strict=True):
            kept[devices] = source[hosts]
        offload_store._load(host, device, list(zip(hosts, devices, strict=True)))
        assert same(device, loaded)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        OffloadStore(caches(layers_of(1)), (0, 4), str(tmp_path / "nowhere"))


def test_a_disk_without_room_is_refused_at_the_start(tmp_path: Path) -> None:
    """A disk without room is refused at the start, instead of a crash of the process when a block
    is written."""
    with pytest.raises(OSError):
        OffloadStore(caches(layers_of(1)), (0, 1 << 44), str(tmp_path))
    assert not os.listdir(tmp_path)


def test_bytes_become_blocks() -> None:
    config = load({"model": {"path": "m"}, "cache": {"offload_bytes": 99}})
    assert count_offload_blocks(config.cache, 10) == (9, 0)
    assert count_offload_blocks(load({"model": {"path": "m"}}).cache, 10) == (0, 0)
