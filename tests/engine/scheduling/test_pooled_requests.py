"""Pooling requests in the scheduler: they sample nothing and finish with the step of their last
token."""

from __future__ import annotations

import pytest

from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.scheduling.request_validation import invalid_reason, wrong_kind
from swell.engine.scheduling.scheduler import Scheduler
from swell.engine.scheduling.step_builder import ScheduledStep
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import PooledValues, PoolingParams, SamplerParams
from swell.worker.wire import ModelRunnerOutput

POOLS = SamplerParams(pooling=PoolingParams())


def request(name: str, tokens: int, first: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(name, list(range(first, first + tokens)), POOLS, 0)


def scheduler(*, whole_prompts: bool = False, blocks: int = 64, **config: int) -> Scheduler:
    settings = SchedulerConfig(**{"max_tokens_per_step": 16, "max_rows": 4, **config})
    cache = CacheConfig(block_tokens=4, prefix_caching=not whole_prompts)
    return Scheduler(settings, KVCacheManager(cache, blocks), 64, 1000, whole_prompts=whole_prompts)


def compute(scheduler: Scheduler, step: ScheduledStep) -> list[EngineCoreOutput]:
    """Updates the scheduler with a worker's results: a vector for each finished row, which names
    it."""
    plan, extras = step.plan, {}
    assert not any(plan.samples)
    for row, (request, start, count) in enumerate(
        zip(step.rows, plan.starts, plan.num_tokens, strict=True)
    ):
        if start + count == request.prompt_tokens:
            extras[row] = [PooledValues(request.request_id.encode())]
    outputs = scheduler.update(step, ModelRunnerOutput(plan.step, extras=extras))
    return [output for of_one in outputs.values() for output in of_one]


def step_of(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    return step


def check_end(output: EngineCoreOutput, name: str) -> None:
    assert (output.request_id, output.finish_reason) == (name, FinishReason.STOP)
    assert output.extras == [PooledValues(name.encode())] and not output.new_token_ids


def test_chunks_and_two_steps_in_flight():
    core = scheduler()
    core.add(request("a", 40), b"client")
    first, second, third = (step_of(core) for _ in range(3))
    assert [step.plan.num_tokens for step in (first, second, third)] == [[16], [16], [8]]
    assert core.schedule() is None, "nothing is left to compute"
    assert compute(core, first) == compute(core, second) == []
    check_end(*compute(core, third), "a")
    core.check_idle()


def test_a_preempted_request_finishes_by_its_step_in_flight():
    core = scheduler()
    core.add(request("a", 10), b"client")
    step = step_of(core)
    core._preempt(core.running[0])
    check_end(*compute(core, step), "a")
    assert core.schedule() is None
    core.check_idle()


def test_lost_steps_are_computed_again():
    core = scheduler()
    core.add(request("a", 20), b"client")
    step_of(core), step_of(core)
    core.preempt_all()
    assert compute(core, step_of(core)) == []
    check_end(*compute(core, step_of(core)), "a")
    core.check_idle()


def test_whole_prompts_wait_for_a_step_with_room():
    core = scheduler(whole_prompts=True, max_chunk_tokens=3)
    for name, tokens in (("a", 7), ("b", 8), ("c", 2), ("d", 16)):
        core.add(request(name, tokens), b"client")
    ended = []
    for wanted in ([7, 8], [2], [16]):
        step = step_of(core)
        assert sorted(step.plan.num_tokens) == sorted(wanted)
        ended += [output.request_id for output in compute(core, step)]
    assert sorted(ended) == ["a", "b", "c", "d"]
    core.check_idle()


def test_a_loss_of_workers_counts_against_the_request():
    core = scheduler()
    core.add(request("a", 10), b"client")
    for expected in (0, 1):
        step_of(core)
        failed = [o for of_one in core.count_failed_attempt().values() for o in of_one]
        assert len(failed) == expected
        core.preempt_all()
    core.check_idle()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"max_tokens": 1}, "max_tokens=1 is outside 0 .. 0"),
        ({"output_token_ids": [3]}, "a pooling request has no output tokens"),
        ({"sampler": SamplerParams(pooling=PoolingParams(dimensions=-1))}, "dimensions=-1"),
        ({"sampler": SamplerParams(pooling=PoolingParams(segment_start=3))}, "segment_start=3"),
        ({"sampler": SamplerParams()}, "max_tokens=0 is outside 1 .. 64"),
    ],
)
def test_requests_that_a_pooling_engine_cannot_run_are_refused(changed, reason):
    fields = {"request_id": "a", "prompt_token_ids": [1, 2], "sampler": POOLS, "max_tokens": 0}
    assert reason in str(invalid_reason(EngineCoreRequest(**{**fields, **changed}), 1000, 64))
    assert invalid_reason(EngineCoreRequest(**fields), 1000, 64) is None


def test_a_model_either_samples_or_pools():
    samples = EngineCoreRequest("a", [1], SamplerParams(), 1)
    assert wrong_kind(samples, samples=True) is wrong_kind(request("a", 1), samples=False) is None
    assert "cannot pool" in str(wrong_kind(request("a", 1), samples=True))
    assert "cannot generate text" in str(wrong_kind(samples, samples=False))
