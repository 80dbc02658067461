"""The steps of a batch, as the scheduler decides them."""

from __future__ import annotations

from typing import NamedTuple

from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.scheduling.scheduler import Scheduler
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import ModelRunnerOutput


class Step(NamedTuple):
    """The work of one step, over all its rows."""

    tokens: int
    sampled: int
    positions: int
    """The KV positions that the step reads or writes."""


def steps(rows: int, inputs: int, outputs: int) -> list[Step]:
    """Returns the steps of `rows` requests that arrive together: `inputs` tokens in, `outputs` out
    each."""
    cache = CacheConfig(prefix_caching=False)
    blocks = rows * (-(-(inputs + outputs) // cache.block_tokens) + 1)
    kv = KVCacheManager(cache, blocks)
    scheduler = Scheduler(SchedulerConfig(max_rows=rows), kv, inputs + outputs, vocab_size=2)
    for row in range(rows):
        request = EngineCoreRequest(str(row), [0] * inputs, SamplerParams(), max_tokens=outputs)
        refused = scheduler.add(request, b"")
        assert refused is None, refused
    made = []
    while (step := scheduler.schedule()) is not None:
        plan, sampled = step.plan, sum(step.plan.samples)
        read = sum(start + count for start, count in zip(plan.starts, plan.num_tokens, strict=True))
        made.append(Step(sum(plan.num_tokens), sampled, read))
        scheduler.update(step, ModelRunnerOutput(plan.step, [0] * sampled))
    return made
