"""The longest sequence is the model's, limited by what the KV cache of every worker can hold, as in
vLLM's `update_max_model_len`. It is known before the buffers of steps are allocated."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.configs.schema import load
from swell.configs.section import ConfigError
from swell.engine.executor import agree_limits
from swell.worker.wire import WorkerLimits
from tests.engine.engine_harness import NANO, engine

BLOCK_BYTES = 2 * 4 * 64 * 4 * 16
"""The bytes of a block of nano: K and V, layers, heads times their size, float32, tokens."""
SPLITS: list[dict[str, Any]] = [{}, {"parallel__pipeline": 2}, {"parallel__tensor": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_the_default_length_is_what_the_cache_holds(split: dict[str, Any]) -> None:
    """The limit is what the cache holds; with tensor parallelism, half of the model needs half of
    the bytes."""
    workers = 2 if split else 1
    with engine(cache__memory_bytes=10 * BLOCK_BYTES // workers, **split) as llm:
        limits = llm._engine.limits
        assert (limits.num_blocks, limits.max_model_len) == (10, 160)
        answer = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        [output] = llm.generate([[5] * 100], answer)
        assert len(output.outputs[0].token_ids) == 60
        with pytest.raises(BadRequest, match="160"):
            llm.generate([[5] * 161], answer)


@pytest.mark.slow
def test_a_configured_length_beyond_the_cache_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        engine(cache__memory_bytes=10 * BLOCK_BYTES, model__max_model_len=161)
    assert str(caught.value) == (
        "model.max_model_len=161 does not fit into the KV cache, which has room for 160 "
        "tokens in 10 blocks; raise cache.memory_bytes (or cache.memory_fraction) or lower "
        "model.max_model_len"
    )
    with engine(cache__memory_bytes=10 * BLOCK_BYTES, model__max_model_len=160) as llm:
        assert llm._engine.limits.max_model_len == 160


def test_the_worker_with_the_smallest_cache_decides() -> None:
    config = load({"model": {"path": NANO}})
    much, little = (WorkerLimits(blocks, 2048, 320) for blocks in (10, 7))
    for limits in ([much, little], [little, much]):
        agreed = agree_limits(config, limits)
        assert (agreed.num_blocks, agreed.max_model_len) == (7, 7 * 16)
    short = WorkerLimits(10, 64, 320)
    assert agree_limits(config, [much, short]).max_model_len == 64
