"""Several steps per plan have the results of one step per plan, with fewer plans and little wasted
work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from swell.engine.scheduling.scheduler import NANS_IN_LOGITS
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.runner import ModelRunner
from swell.worker.sampler_wire import SamplerParams, TokenLogprobs
from tests.engine.executor.fake_worker import expected, make_core, run, token_ids
from tests.engine.outputs.test_nan_logits import NAN, spoil
from tests.engine.outputs.test_token_exact import Engine
from tests.support.device import DEVICE
from tests.worker import tiny_models

CLIENT = b"ingress"
PROMPT = [1, 2, 3]


def request(name: str = "r", max_tokens: int = 20, **extra: Any) -> EngineCoreRequest:
    return EngineCoreRequest(name, PROMPT, SamplerParams(seed=len(name)), max_tokens, **extra)


def extra_passes(core: Any) -> list[list[int]]:
    """Returns the passes of the rows, after the first, of each plan that has rows."""
    return [list(plan.extra_steps.values()) for plan in core.executor.plans if plan.slots]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_plan_yields_several_tokens(depth: int) -> None:
    core = make_core(steps_per_plan=4, steps_in_flight=depth)
    core.add_request(request(max_tokens=15), CLIENT)
    outputs = run(core)["r"]
    assert token_ids(outputs) == expected(request(max_tokens=15))
    # The prompt's step, three plans of four tokens, and the remaining token.
    assert [len(output.new_token_ids) for output in outputs] == [1, 4, 4, 4, 2]
    assert extra_passes(core) == [[], [3], [3], [3], [1]]
    core.check_idle()


@pytest.mark.parametrize("knows_ends", [True, False])
def test_few_computed_tokens_are_discarded(knows_ends: bool) -> None:
    """At most one token fewer than a plan has is discarded, and none if the worker detects the
    finish."""
    long = expected(request(max_tokens=30))
    for end in range(1, 30):
        one = request(max_tokens=30, stop_token_ids=[long[end]])
        core = make_core(steps_per_plan=4, steps_in_flight=1)
        worker = core.executor.worker
        worker.knows_ends = lambda slot: knows_ends
        core.add_request(one, CLIENT)
        outputs = run(core)["r"]
        assert token_ids(outputs) == expected(one)
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert 0 <= worker.num_sampled - len(expected(one)) <= (0 if knows_ends else 3)
        core.check_idle()


@pytest.mark.parametrize("knows_ends", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_block_filled_by_an_end_token_is_cached_only_if_computed(
    knows_ends: bool, depth: int
) -> None:
    """A block that the last token fills is found only if it was computed. Nothing computes the last
    token of a row whose finish was detected, at any place of its plan and of its block."""
    long = expected(request(max_tokens=40))
    for end in range(1, 40):
        one = request(max_tokens=40, stop_token_ids=[long[end]])
        core = make_core(steps_per_plan=5, steps_in_flight=depth)
        core.executor.worker.knows_ends = lambda slot: knows_ends
        core.add_request(one, CLIENT)
        answer = token_ids(run(core)["r"])
        prompt = [*PROMPT, *answer, 7]
        after = EngineCoreRequest("next", prompt, SamplerParams(seed=3), 5)
        assert core.add_request(after, CLIENT) is None
        assert token_ids(run(core)["next"]) == expected(after)
        found, known = core.scheduler.kv.num_hit_tokens, len(PROMPT) + len(answer)
        least, most = ((known - left_out) // 4 * 4 for left_out in (1, 0))
        assert found == least if knows_ends and depth == 1 else found in (least, most)


def test_extra_steps_of_a_plan_do_not_delay_its_prompts() -> None:
    core = make_core(steps_per_plan=4, steps_in_flight=1)
    core.add_request(request("a", 30), CLIENT)
    core.step()
    core.step()
    core.add_request(request("bb", 30), CLIENT)
    before = len(core.executor.plans)
    core.step()
    plan = core.executor.plans[before]
    assert len(plan.slots) == 2 and plan.new_requests and not plan.extra_steps
    outputs = run(core)
    assert token_ids(outputs["bb"]) == expected(request("bb", 30))[1:]


def test_extra_steps_use_no_block_that_another_row_may_need() -> None:
    """Further steps take no block that another row may need: each running request may soon want
    one."""
    core = make_core(num_blocks=10, max_model_len=40, steps_per_plan=8, steps_in_flight=1)
    names = ["a", "bb", "ccc"]
    for name in names:
        core.add_request(request(name, 9), CLIENT)
    outputs = run(core)
    assert core.scheduler.num_preemptions == 0
    assert any(extra_passes(core))
    for name in names:
        assert token_ids(outputs[name]) == expected(request(name, 9))


def test_nothing_is_computed_beyond_the_longest_sequence() -> None:
    core = make_core(max_model_len=16, steps_per_plan=8, steps_in_flight=1)
    core.add_request(request(max_tokens=13), CLIENT)
    assert len(token_ids(run(core)["r"])) == 13
    for plan in core.executor.plans:
        for row, count in plan.extra_steps.items():
            assert plan.starts[row] + plan.num_tokens[row] + count <= 16


def test_a_request_aborted_between_plans_leaves_nothing() -> None:
    core = make_core(steps_per_plan=4, steps_in_flight=3)
    core.add_request(request("a", 30), CLIENT)
    core.add_request(request("bb", 30), CLIENT)
    core.step()
    core.step()
    core.abort_requests(["a"])
    run(core)
    core.check_idle()


@pytest.mark.parametrize("steps", [1, 4, 16, 32])
def test_the_next_turn_finds_the_blocks_of_the_last_plans(steps: int) -> None:
    core = make_core(steps_per_plan=steps, steps_in_flight=2)
    core.add_request(request(max_tokens=33), CLIENT)
    answer = token_ids(run(core)["r"])
    core.add_request(EngineCoreRequest("next", [*PROMPT, *answer, 7], SamplerParams(), 1), CLIENT)
    run(core)
    assert core.scheduler.kv.num_hit_tokens == 32


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"parallel__tensor": 2}, {"parallel__pipeline": 2}])
def test_the_workers_detect_an_end_token(tmp_path: Path, split: dict[str, Any]) -> None:
    """The workers detect a finish and leave the row out of the later passes: the same tokens, and
    no wasted pass. Workers that would have to agree on it do not detect it; the host of a GPU
    cannot."""
    tiny_models.make(tmp_path, "llama")
    sampler = SamplerParams(temperature=3.0, seed=5)
    with Engine(tmp_path) as plain:
        [outputs] = plain.answer([EngineCoreRequest("x", [5, 6], sampler, 30)]).values()
    good = token_ids(outputs)
    settings = {"scheduler__steps_per_plan": 8, "scheduler__steps_in_flight": 1, **split}
    with Engine(tmp_path, **settings) as engine:
        for end in range(1, 30):
            if good.index(good[end]) < end:
                continue
            one = EngineCoreRequest("x", [5, 6], sampler, 30, stop_token_ids=[good[end]])
            with counted_passes() as passes:
                [outputs] = engine.answer([one]).values()
            assert token_ids(outputs) == good[: end + 1]
            wasted = max(passes.values()) - (end + 1)
            is_found = DEVICE == "cpu" and not split
            assert wasted == 0 if is_found else 0 <= wasted <= 7


@pytest.mark.slow
def test_an_end_token_at_the_end_of_a_prompt_does_not_finish_it(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, "llama")
    one = EngineCoreRequest("x", [5, 6], SamplerParams(), 9, stop_token_ids=[6])
    with Engine(tmp_path) as plain:
        [outputs] = plain.answer([one]).values()
    wanted = token_ids(outputs)
    settings = {"scheduler__steps_per_plan": 4, "scheduler__max_chunk_tokens": 1}
    with Engine(tmp_path, **settings, scheduler__steps_in_flight=1) as engine:
        [outputs] = engine.answer([one]).values()
    assert token_ids(outputs) == wanted and len(wanted) > 5
    assert len(outputs[0].new_token_ids) == 4  # with the last chunk, which is that token


@pytest.mark.slow
@pytest.mark.parametrize("split", [{}, {"parallel__tensor": 2}])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_end_token_within_min_tokens_does_not_finish_the_request(
    tmp_path: Path, depth: int, split: dict[str, Any]
) -> None:
    """A stop token before `min_tokens` does not finish the request. The sampler draws one early
    only if the parameters contradict each other, as here."""
    tiny_models.make(tmp_path, "llama")
    ends = list(range(40, 48))
    sampler = SamplerParams(temperature=3.0, seed=5, allowed_token_ids=ends)
    one = EngineCoreRequest("x", [5, 6], sampler, 24, min_tokens=20, stop_token_ids=ends)

    def after(answer: list[int]) -> EngineCoreRequest:
        return EngineCoreRequest("next", [5, 6, *answer, 7], SamplerParams(), 6)

    block = {"cache__block_tokens": 4}
    with Engine(tmp_path, **block) as plain:
        [outputs] = plain.answer([one]).values()
        good = token_ids(outputs)
        [outputs] = plain.answer([after(good)]).values()
        wanted = token_ids(outputs)
    settings = {"scheduler__steps_per_plan": 4, "scheduler__steps_in_flight": depth}
    with Engine(tmp_path, **settings, **block, **split) as engine:
        [outputs] = engine.answer([one]).values()
        assert token_ids(outputs) == good and len(good) == 20
        assert any(len(output.new_token_ids) == 4 for output in outputs)
        [outputs] = engine.answer([after(good)]).values()
        assert token_ids(outputs) == wanted


@contextmanager
def counted_passes() -> Iterator[Counter[int]]:
    """Yields a count of the passes with rows for each model runner."""
    found, execute = Counter[int](), ModelRunner._execute

    def counted(runner: ModelRunner, plan: Any) -> Any:
        found[id(runner)] += bool(plan.slots)
        return execute(runner, plan)

    with patch.object(ModelRunner, "_execute", counted):
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_tokens_before_nan_logits_are_kept(tmp_path: Path, at: int, depth: int) -> None:
    """The tokens before NaN logits are kept; the token at this place of the answer has an embedding
    of NaN."""
    tiny_models.make(tmp_path, "llama")
    sampler = SamplerParams(temperature=3.0, seed=5, logprobs=0)
    asked = EngineCoreRequest("x", [5, 6], sampler, 12)
    with Engine(tmp_path) as plain:
        [outputs] = plain.answer([asked]).values()
    good = token_ids(outputs)
    assert good.index(good[at]) == at
    spoil(tmp_path, good[at], NAN)
    settings = {"scheduler__steps_per_plan": 4, "scheduler__steps_in_flight": depth}
    for stops in ([], [good[at]]):
        with Engine(tmp_path, **settings) as engine:
            one = msgspec.structs.replace(asked, stop_token_ids=stops)
            [outputs] = engine.answer([one]).values()
            assert token_ids(outputs) == good[: at + 1]
            extras = [extra for output in outputs for extra in output.extras]
            assert len(extras) == at + 1
            assert all(isinstance(extra, TokenLogprobs) for extra in extras)
            end = outputs[-1]
            assert engine.core.scheduler.num_nans_in_logits == (not stops)
            if stops:
                assert end.finish_reason is FinishReason.STOP
            else:
                assert (end.finish_reason, end.stop_reason) == (FinishReason.ERROR, NANS_IN_LOGITS)
            assert not any(output.finish_reason for output in outputs[:-1])
