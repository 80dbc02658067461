"""The number of KV blocks of a worker, from the memory that it has left and the memory that steps
need besides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swell.configs.parallel import ParallelConfig
from swell.configs.schema import Config, load
from swell.worker.cache_size import block_bytes, count_cache_blocks
from swell.worker.comm.mesh import Mesh
from swell.worker.drafting.draft_model import NO_DRAFT_MODEL
from swell.worker.layers.moe import ExpertTraits, MoE

STEP_TOKENS, HIDDEN, TOP_K, INNER = 512, 64, 4, 96
GPU = torch.device("cuda", 0)
FREE = 16 * 1024**3


class TinyModel:
    """One attention layer, and one layer of experts."""

    def __init__(self) -> None:
        traits = ExpertTraits(8, INNER, TOP_K, True, True, ("w1", "w3", "w2"))
        mesh = Mesh.build(ParallelConfig(expert=True), 0)
        self._moe = MoE(HIDDEN, traits, mesh).to(torch.bfloat16)

    def moe_layers(self) -> list[MoE]:
        return [self._moe]

    def attention_layers(self) -> list[Any]:
        return [SimpleNamespace(kv_heads=2, head_dim=16, lookahead=False)]


def config_of(**cluster: Any) -> Config:
    data, memory = cluster.pop("data", 1), cluster.pop("memory_bytes", None)
    return load(
        {
            "model": {"path": "m"},
            "parallel": {"expert": True, "data": data},
            "scheduler": {"max_tokens_per_step": STEP_TOKENS, "max_rows": 4},
            "cache": {"memory_bytes": memory},
            "cluster": cluster,
        }
    )


def blocks(config: Config, free: int = FREE) -> int:
    model: Any = TinyModel()
    sizes = config, model, torch.bfloat16, NO_DRAFT_MODEL
    return count_cache_blocks(*sizes, GPU, free, length=4096, mapped_bytes=0, adapter_bytes=0)


def exchanged_bytes(engines: int) -> int:
    """Tokens and sums of all engines, their choices with weights and places, and the inner values
    and outputs of their experts."""
    elements = 2 * HIDDEN + TOP_K * (3 + HIDDEN + INNER)
    return engines * STEP_TOKENS * (2 * elements + 8 * TOP_K)


@pytest.mark.parametrize("data", [1, 4])
def test_the_cache_leaves_room_for_the_exchange_of_the_most_engines(data: int) -> None:
    """Engines may join later, and the caches keep their sizes."""
    few, many = config_of(data=data, max_engines=4), config_of(data=data, max_engines=40)
    model: Any = TinyModel()
    each = block_bytes(few, model, torch.bfloat16, NO_DRAFT_MODEL)
    less = (blocks(few) - blocks(many)) * each
    more_engines = exchanged_bytes(40) - exchanged_bytes(4)
    assert more_engines - each <= less <= more_engines + each


def test_an_exchange_that_does_not_fit_names_the_number_of_engines() -> None:
    """`cache.memory_bytes` is not checked against the free memory."""
    with pytest.raises(ValueError, match=r"cluster\.max_engines=1000 .*; lower .*max_engines"):
        blocks(config_of(max_engines=1000), free=3 * 1024**3 // 4)
    given = config_of(max_engines=1000, memory_bytes=10**6)
    assert blocks(given, free=3 * 1024**3 // 4) == blocks(given)
