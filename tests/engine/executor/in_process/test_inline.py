"""One worker on the engine's own thread: it computes steps ahead only where they overlap, and can
be interrupted."""

from __future__ import annotations

import threading

import pytest

import swell.worker.worker
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import GroupBroken, build_executor
from swell.engine.executor.inline import InlineExecutor
from swell.engine.wire import EngineCoreRequest
from swell.worker.comm.groups import GroupError
from swell.worker.sampler_wire import SamplerParams
from tests.engine.executor.fake_worker import regroup
from tests.worker import tiny_models

WANTED = [
    EngineCoreRequest("a", list(range(3, 40)), SamplerParams(), 12),
    EngineCoreRequest("b", [5] * 40, SamplerParams(temperature=0.9, seed=7), 12),
]


@pytest.fixture
def core(tmp_path):
    tiny_models.make(tmp_path, "llama-llama3")
    overrides = {
        "model.dtype": "float32",
        "model.device": "cpu",
        "model.cpu_threads": 1,
        "parallel.executor": "inproc",
        "cache.memory_bytes": 4_000_000,
        "scheduler.max_rows": 4,
    }
    config = load(str(tmp_path), overrides)
    executor = build_executor(config)
    core = EngineCore(config, executor, executor.start())
    yield core
    core.shutdown()


def answers(core: EngineCore) -> dict[str, list[int]]:
    for request in WANTED:
        assert core.add_request(request, b"test") is None
    return finish(core)


def finish(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step().get(b"test", []):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    core.check_idle()
    return tokens


@pytest.fixture
def execute_model(monkeypatch):
    """Returns a function that replaces the worker's step; the replacement receives the real
    step."""
    real = swell.worker.worker.Worker.execute_model

    def replace(stand_in):
        monkeypatch.setattr(
            swell.worker.worker.Worker,
            "execute_model",
            lambda worker, plan: stand_in(lambda: real(worker, plan)),
        )

    return replace


def test_a_cpu_computes_one_step_at_a_time_on_the_callers_thread(core, execute_model):
    """On a CPU one step at a time is computed on the caller's thread, so a request that arrives
    during a step is in the next one."""
    threads, steps = [], []

    def watch(real):
        threads.append(threading.current_thread())
        steps.append(core.num_steps)
        return real()

    execute_model(watch)
    answers(core)
    assert isinstance(core.executor, InlineExecutor)
    assert set(threads) == {threading.current_thread()}
    assert steps == list(range(len(steps))), "each result was read before the next step began"


def test_steps_in_flight_do_not_change_answers(core, monkeypatch):
    """Steps ahead, as on a GPU, return the same answers: a step is planned before the host knows
    the tokens that precede it."""
    whole = answers(core)
    monkeypatch.setattr(InlineExecutor, "overlaps", True)
    ahead = EngineCore(core.config, core.executor, core.limits)
    regroup(ahead)
    assert answers(ahead) == whole


def test_an_interrupt_inside_a_step_loses_only_that_step(core, execute_model):
    whole = answers(core)
    interrupts = iter([False, True, False, False, True])

    def interrupted(real):
        output = real()
        if next(interrupts, False):
            raise KeyboardInterrupt
        return output

    execute_model(interrupted)
    for request in WANTED:
        assert core.add_request(request, b"test") is None
    tokens: dict[str, list[int]] = {}
    seen = 0
    while core.has_work:
        try:
            outputs = core.step().get(b"test", [])
        except KeyboardInterrupt:
            seen += 1
            continue
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert seen == 2
    assert tokens == whole
    core.check_idle()


def test_an_interrupted_prompt_is_not_found_as_a_prefix(core, execute_model):
    """An interrupted prompt is not found as a prefix: its blocks got their hashes when the step was
    planned, but hold no keys and values."""
    whole = answers(core)
    interrupts = iter([True])

    def interrupted(real):
        if next(interrupts, False):
            raise KeyboardInterrupt
        return real()

    core.scheduler.kv.reset_prefix_cache()
    execute_model(interrupted)
    core.add_request(WANTED[0], b"test")
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.abort_requests(["a"])
    hits = core.scheduler.kv.num_hit_tokens
    assert answers(core) == whole
    assert core.scheduler.kv.num_hit_tokens == hits


def test_a_broken_group_recovers_by_a_regroup(core, execute_model):
    whole = answers(core)
    failures = iter([False, True])

    def broken(real):
        if next(failures, False):
            raise GroupError("a peer has gone")
        return real()

    execute_model(broken)
    for request in WANTED:
        core.add_request(request, b"test")
    first = core.step()[b"test"]
    with pytest.raises(GroupBroken, match="a peer has gone"):
        core.step()
    with pytest.raises(GroupBroken, match="planned before"):
        core.step()
    regroup(core)
    tokens = finish(core)
    for output in first:
        tokens[output.request_id] = output.new_token_ids + tokens[output.request_id]
    assert tokens == whole
