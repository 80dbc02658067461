"""A row that fails terminates only its own request; all other requests run as without it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.core import EngineCore
from swell.engine.scheduling import scheduler as module
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker import runner
from swell.worker.comm.groups import GroupError
from swell.worker.sample import grammar
from swell.worker.sample.logit_bias import LogitBias
from swell.worker.sampler_wire import Grammar, SamplerParams
from swell.worker.wire import ModelRunnerOutput, SchedulerOutput
from tests.engine.conservation import cached_run, check_blocks
from tests.engine.executor.fake_worker import VOCAB, FakeWorker, expected, make_core, run, token_ids
from tests.engine.outputs.test_token_exact import Engine
from tests.support.device import DEVICE
from tests.support.paths import ROOT
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

CLIENT = b"ingress"
WHY = "it fell"

# ---------------------------------------------------------------- the engine's half


class FailingRowsWorker(FakeWorker):
    """A worker that reports failed rows: at their first step, their first token, or a later one."""

    def __init__(self, worker: FakeWorker, fails_at: dict[int, int]) -> None:
        """`fails_at`: the seed of a request -> the number of known tokens of its slot when it
        fails."""
        super().__init__(len(worker.cache), worker.block_tokens)
        self.fails_at = fails_at

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().compute(plan)
        failed = {}
        for row, (slot, start, count) in enumerate(
            zip(plan.slots, plan.starts, plan.num_tokens, strict=True)
        ):
            at = self.fails_at.get(self.seeds[slot])
            if at is not None and start + count >= at:
                failed[row] = WHY
        return msgspec.structs.replace(output, failed=failed)


def failing_core(fails_at: dict[int, int], **settings: Any) -> EngineCore:
    core = make_core(**settings)
    executor: Any = core.executor
    executor.worker = FailingRowsWorker(executor.worker, fails_at)
    return core


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    fails_at=st.dictionaries(st.integers(0, 11), st.integers(1, 40), max_size=6),
    depth=st.integers(1, 4),
    num_blocks=st.sampled_from([20, 64]),
    budget=st.sampled_from([7, 100]),
    shared=st.booleans(),
    steps=st.sampled_from([1, 4]),
)
def test_a_failed_row_fails_only_its_request(
    prompts, fails_at, depth, num_blocks, budget, shared, steps
) -> None:
    """A failed row terminates only its request: with chunks, preemption, prefixes and several steps
    in flight. No block or slot leaks."""
    core = failing_core(
        fails_at,
        num_blocks=num_blocks,
        steps_in_flight=depth,
        max_tokens_per_step=budget,
        max_rows=min(4, budget),
        steps_per_plan=steps,
    )
    wanted = {}
    for seed, length in enumerate(prompts):
        prompt = [(i if shared else i * (seed + 3)) % VOCAB for i in range(length)]
        one = EngineCoreRequest(f"r{seed}", prompt, SamplerParams(seed=seed), 6 + seed % 7)
        wanted[one.request_id] = one
        assert core.add_request(one, CLIENT) is None
    outputs = run(core)
    for seed, (name, one) in enumerate(wanted.items()):
        true, last = expected(one), outputs[name][-1]
        got = token_ids(outputs[name])
        at = fails_at.get(seed)
        if at is None or at >= len(one.prompt_token_ids) + len(true):
            assert got == true and last.finish_reason is FinishReason.LENGTH
        else:
            assert (last.finish_reason, last.stop_reason) == (FinishReason.ERROR, WHY)
            assert got == true[: max(0, at - len(one.prompt_token_ids))], (
                "tokens before the failure"
            )
            assert not any(o.finish_reason for o in outputs[name][:-1])
    core.check_idle()
    check_blocks(core.scheduler.kv.pool)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_fails_at_its_last_token_affects_no_other_row(failing: int, depth: int) -> None:
    """A row that fails at its last token, in a plan whose further passes are only for the other
    row, takes no passes from that row."""
    prompt, lengths = [1, 2, 3], {failing: 6, 1 - failing: 20}
    fails_at = {failing: len(prompt) + lengths[failing] - 1}
    core = failing_core(fails_at, steps_per_plan=4, steps_in_flight=depth)
    asked = {
        seed: EngineCoreRequest(f"r{seed}", prompt, SamplerParams(seed=seed), lengths[seed])
        for seed in range(2)
    }
    for one in asked.values():
        core.add_request(one, CLIENT)
    outputs = run(core)
    assert token_ids(outputs[f"r{1 - failing}"]) == expected(asked[1 - failing])
    assert token_ids(outputs[f"r{failing}"]) == expected(asked[failing])[:-1]
    assert outputs[f"r{failing}"][-1].stop_reason == WHY
    executor: Any = core.executor
    assert any(0 < len(plan.extra_steps) < len(plan.slots) for plan in executor.plans)
    core.check_idle()


def test_blocks_of_a_failed_request_are_never_found_in_the_prefix_cache() -> None:
    core = failing_core({0: 9})
    prompt = list(range(9))
    for seed in range(2):
        core.add_request(EngineCoreRequest(f"r{seed}", prompt, SamplerParams(seed=seed), 3), CLIENT)
        outputs = run(core)[f"r{seed}"]
    assert core.scheduler.kv.num_hit_tokens == 0 and len(token_ids(outputs)) == 3
    core.add_request(EngineCoreRequest("r2", prompt, SamplerParams(seed=2), 3), CLIENT)
    run(core)
    assert core.scheduler.kv.num_hit_tokens == 8, "blocks of the good request are found"


def test_blocks_from_before_a_preemption_of_a_failed_request_are_not_found() -> None:
    """Blocks that a failed request computed before a preemption are not found either. The step that
    reports the failure was in flight when the request lost its blocks, which kept their hashes."""
    core = make_core(num_blocks=16, steps_in_flight=2)
    scheduler = core.scheduler
    core.add_request(EngineCoreRequest("r", list(range(9)), SamplerParams(), 3), CLIENT)
    step = scheduler.schedule()
    assert step is not None
    [request] = step.rows
    assert len(cached_run(scheduler.kv.pool, request.block_hashes)) == 2
    scheduler._preempt(request)
    failed = ModelRunnerOutput(step.plan.step, [0], rows_with_nans=[0])
    [answer] = scheduler.update(step, failed)[CLIENT]
    assert answer.finish_reason is FinishReason.ERROR
    assert cached_run(scheduler.kv.pool, request.block_hashes) == []
    core.check_idle()
    check_blocks(scheduler.kv.pool)


# ---------------------------------------------------------------- the worker's half

BREAKING: dict[str, dict[str, Any]] = {
    "a bad word beyond the vocabulary": {"bad_words": [[5], [5000]]},
    "a bad word below it": {"bad_words": [[-400]]},
    "an empty bad word": {"bad_words": [[]]},
    "a biased token beyond it": {"logit_bias": {5000: 1.0}},
    "an allowed token beyond it": {"allowed_token_ids": [5, 5000]},
    "an allowed token below it": {"allowed_token_ids": [-1]},
    "a number of 70 bits": {"temperature": 1.0, "top_k": 2**70},
    "less than no log probabilities": {"logprobs": -3},
    "less than none of the prompt": {"prompt_logprobs": -1},
    "more than any of the prompt": {"prompt_logprobs": 2**70},
    "infinite bias": {"logit_bias": {5: float("inf")}},
    "bias that is no number": {"logit_bias": {5: float("nan")}},
    "a penalty that is no number": {"repetition_penalty": float("nan")},
    "a grammar that is none": {"grammar": Grammar("start: /(/")},
}
GOOD = {
    "greedy": SamplerParams(),
    "drawn": SamplerParams(temperature=1.0, seed=7, top_k=30),
    "edited": SamplerParams(bad_words=[[5], [6, 7]], logit_bias={3: 2.0}, logprobs=1),
    "limited": SamplerParams(allowed_token_ids=[*range(3, 90)], frequency_penalty=0.4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.make(path, "llama")
    return path


@pytest.fixture
def skip_validation(monkeypatch) -> None:
    """Disables the engine's validation: the worker must survive every invalid request by itself."""
    monkeypatch.setattr(module, "invalid_reason", lambda *_: None)


def good() -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(name, [9 + i] * (i + 3), params, 8)
        for i, (name, params) in enumerate(GOOD.items())
    ]


def bad(name: str) -> EngineCoreRequest:
    params = SamplerParams(**BREAKING[name])
    skips = params.prompt_logprobs is not None
    return EngineCoreRequest("bad", [4] * 20, params, 8, skip_prefix_cache=skips)


def fields(outputs: list[EngineCoreOutput]) -> list[object]:
    return [(o.new_token_ids, o.finish_reason, o.stop_reason, o.extras) for o in outputs]


def check_all(engine: Engine, exact: bool = True) -> None:
    alone = engine.answer(good())
    for name in BREAKING:
        first, *others = good()
        got = engine.answer([first, bad(name), *others])
        (last,) = got.pop("bad")
        assert last.finish_reason is FinishReason.ERROR and last.stop_reason, name
        for good_name, outputs in got.items():
            if exact:
                assert fields(outputs) == fields(alone[good_name]), name
            else:
                assert token_ids(outputs) == token_ids(alone[good_name]), name


@pytest.mark.parametrize("settings", [{}, {"scheduler__max_tokens_per_step": 8}], ids=str)
def test_a_broken_request_fails_only_itself(folder, skip_validation, settings) -> None:
    with Engine(folder, model__cpu_threads=1, cache__prefix_caching=False, **settings) as engine:
        check_all(engine, exact=DEVICE == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_ranks_agree_on_the_broken_rows(folder, skip_validation, split) -> None:
    with Engine(
        folder,
        model__cpu_threads=1,
        scheduler__steps_in_flight=3,
        scheduler__max_tokens_per_step=16,
        cache__prefix_caching=False,
        **{f"parallel__{split}": 2},
    ) as engine:
        check_all(engine, exact=False)
        assert max(engine.depths) == 3


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_a_grammar_that_one_rank_cannot_follow_fails_its_request(
    folder, monkeypatch, steps: int
) -> None:
    """A grammar may fail on one rank only, which then samples another token. For that rank the
    token may be the last one of the row, but both ranks compute the same passes."""
    follows = grammar.GrammarState.matcher

    def matcher(self: grammar.GrammarState) -> Any:
        if threading.current_thread().name == "swell-worker-1":
            self._fail("not here")
        return follows(self)

    tokenizer = ROOT / "configs/models/nano/tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    monkeypatch.setattr(grammar.GrammarState, "matcher", matcher)
    settings = {"parallel__tensor": 2, "scheduler__steps_per_plan": steps}
    with Engine(folder, model__cpu_threads=1, **settings) as engine:
        alone = engine.answer(good())
        params = SamplerParams(grammar=Grammar("start: /a+/"), temperature=2.0, seed=1)
        ends = [token for token in range(256) if token != ord("a")]
        bad = EngineCoreRequest("bad", [4] * 9, params, 20, stop_token_ids=ends)
        got = engine.answer([*good(), bad])
        (last,) = got.pop("bad")
        assert last.finish_reason is FinishReason.ERROR
        assert last.stop_reason == "the output cannot follow its grammar on 1 of the tensor ranks"
        assert {n: token_ids(o) for n, o in got.items()} == {
            n: token_ids(o) for n, o in alone.items()
        }


@pytest.mark.parametrize("error", [MemoryError("no room"), GroupError("a peer has gone")])
def test_a_failure_outside_any_row_fails_no_request(folder, monkeypatch, error) -> None:
    def add_request(*_args: object) -> None:
        raise error

    with Engine(folder, model__cpu_threads=1) as engine:
        monkeypatch.setattr(LogitBias, "add_request", add_request)
        with pytest.raises(Exception, match=str(error)):
            engine.answer(good())


def test_an_error_of_the_whole_step_fails_no_request(folder, monkeypatch) -> None:
    def build(*_args: object) -> None:
        raise ValueError("the scheduler has lost count")

    with Engine(folder, model__cpu_threads=1) as engine:
        monkeypatch.setattr(runner.BatchBuilder, "build", build)
        with pytest.raises(ValueError, match="lost count"):
            engine.answer(good())
