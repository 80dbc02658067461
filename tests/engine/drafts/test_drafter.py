"""The number of drafts of each row; drafts take no budget from other rows; the counts."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args, get_type_hints

import msgspec
import pytest

from swell.engine import row_drafts
from swell.engine.request import Request
from swell.engine.row_drafts import Proposer
from swell.engine.scheduling.drafter import (
    DRAFTERS,
    Drafter,
    ProposingDrafter,
    make_drafter,
)
from swell.engine.scheduling.ngram import NgramDrafter
from swell.engine.serving.engine_report import report_of
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import PromptLogprobs, SamplerParams, TokenLogprobs
from tests.engine.drafts.planted_drafts import plant
from tests.engine.executor.fake_worker import expected, make_core, run, token_ids

CLIENT = b"ingress"
DRAFTS = {"method": "ngram"}


def request(name: str, prompt: list[int], max_tokens: int = 20, **extra: object):
    return EngineCoreRequest(name, prompt, SamplerParams(), max_tokens, **extra)


def planted(kind: str, drafts: dict | None = None, **options: object):
    core = make_core(drafts={**DRAFTS, **(drafts or {})}, **options)
    return core, plant(core, kind, expected)


def numbers_of_drafts(core) -> list[list[int]]:
    """Returns for each step the number of drafts of each row that has some."""
    return [[len(tokens) for tokens in plan.drafts.values()] for plan in core.executor.plans]


def test_without_a_method_nothing_is_proposed():
    assert type(make_core().scheduler.drafter) is Drafter
    assert type(make_core(drafts=DRAFTS).scheduler.drafter) is NgramDrafter


def test_every_method_of_the_configuration_has_a_proposer():
    core = make_core(drafts=DRAFTS)
    for method in DRAFTERS:
        config = msgspec.structs.replace(core.config.drafts, method=method)
        assert isinstance(make_drafter(config, 64), ProposingDrafter)
    kinds = get_args(get_type_hints(type(core.config.drafts))["method"])
    assert {"none", *DRAFTERS} == set(kinds)


def test_right_drafts_save_steps_and_are_counted():
    core, drafts = planted("right", {"max_tokens": 4})
    core.add_request(request("r", [1, 2, 3], 21), CLIENT)
    outputs = run(core)["r"]
    assert token_ids(outputs) == expected(request("r", [1, 2, 3], 21))
    # The prompt's step, then 1 + 3, 1 + 4, 1 + 4, 1 + 4 and the last token.
    assert [len(output.new_token_ids) for output in outputs] == [1, 4, 5, 5, 5, 1]
    assert (drafts.num_drafts, drafts.num_accepted) == (15, 15)
    report = report_of(
        core, rank=0, incarnation=0, progress_at_forming=0, repairs=0, resets=0, roster_epoch=0
    )
    assert (report.drafts, report.accepted_drafts) == (15, 15)


@pytest.mark.parametrize("kind", ["right", "mixed", "wrong"])
@pytest.mark.parametrize("max_tokens", range(4, 14))
def test_an_answer_is_found_as_a_prefix_up_to_its_last_token(kind, max_tokens):
    """An answer is found as a prefix as without drafts: what is computed is cached, and nothing of
    a rejected draft."""
    core, _ = planted(kind)
    first = request("first", [1, 2, 3], max_tokens)
    core.add_request(first, CLIENT)
    tokens = [1, 2, 3, *token_ids(run(core)["first"])]
    second = request("second", [*tokens, 9, 9, 9, 9], 5)
    core.add_request(second, CLIENT)
    outputs = run(core)["second"]
    assert outputs[0].num_cached_tokens == (len(tokens) - 1) // 4 * 4
    assert token_ids(outputs) == expected(second)
    core.check_idle()


def test_no_draft_follows_the_last_token_or_an_end_token():
    core, _ = planted("right")
    whole = expected(request("r", [1, 2, 3], 12))
    end = next(token for token in whole[4:] if token not in whole[:4])
    core.add_request(request("long", [1, 2, 3], 12), CLIENT)
    core.add_request(request("stop", [1, 2, 3], 12, stop_token_ids=[end]), CLIENT)
    outputs = run(core)
    assert token_ids(outputs["long"]) == whole
    assert outputs["stop"][-1].finish_reason is FinishReason.STOP
    assert token_ids(outputs["stop"]) == whole[: whole.index(end) + 1]
    for plan in core.executor.plans:
        for row, tokens in plan.drafts.items():
            assert end not in tokens or plan.slots[row] == 7, "7: the slot of `long`"
            assert plan.starts[row] + plan.num_tokens[row] <= 3 + 12 - 1


def test_wrong_drafts_pause_drafting_with_growing_delays():
    core = make_core(drafts=DRAFTS, max_model_len=300, num_blocks=100)
    inner = plant(core, "wrong", expected)
    core.scheduler.drafter = ProposingDrafter(core.config.drafts, 300, inner._make_proposer)
    wanted = request("r", [1, 2, 3], 200)
    core.add_request(wanted, CLIENT)
    assert token_ids(run(core)["r"]) == expected(wanted)
    steps = [step for step, drafts in enumerate(numbers_of_drafts(core)) if drafts]
    pauses = [later - earlier - 1 for earlier, later in pairwise(steps)]
    first, longest = row_drafts.FIRST_PAUSE, row_drafts.FIRST_PAUSE << row_drafts.MAX_DOUBLINGS
    assert pauses == [min(first << i, longest) for i in range(len(pauses))] and len(pauses) >= 5
    assert numbers_of_drafts(core)[steps[0]] == [row_drafts.FIRST_LENGTH]
    assert all(numbers_of_drafts(core)[step] == [1] for step in steps[1:])


@pytest.mark.parametrize(
    ("rows", "drafts"), [(1, [5]), (2, [5, 5]), (4, [2, 2, 2, 2]), (8, [1] * 4)]
)
def test_the_tokens_of_a_step_are_shared_until_it_is_full(rows, drafts):
    core, _ = planted("right", {"max_step_tokens": 12, "max_tokens": 5}, steps_in_flight=1)
    for row in range(rows):
        core.add_request(request(f"r{row}", [row, 1], 40), CLIENT)
    for _ in range(12):
        core.step()
    assert drafts in numbers_of_drafts(core)[4:]
    for step, plan in zip(numbers_of_drafts(core), core.executor.plans, strict=True):
        assert not step or sum(plan.num_tokens) <= 12


def test_rows_beyond_the_limit_have_no_proposals():
    core, drafts = planted("right", {"max_step_tokens": 4})
    proposals = []
    make = drafts._make_proposer

    class Recorded(Proposer):
        def __init__(self, request):
            self._inner = make(request)

        def propose(self, tokens, count):
            proposals.append(count)
            return self._inner.propose(tokens, count)

    drafts._make_proposer = Recorded
    for row in range(8):
        core.add_request(request(f"r{row}", [row, 1], 10), CLIENT)
    run(core)
    assert not proposals and not any(numbers_of_drafts(core))


def test_drafts_use_no_budget_or_block_that_another_row_needs():
    core, _ = planted("right", max_tokens_per_step=6, num_blocks=11)
    names = [f"r{row}" for row in range(4)]
    for row, name in enumerate(names):
        core.add_request(request(name, [row, 5], 8), CLIENT)
    outputs = run(core)
    assert all(len(token_ids(outputs[name])) == 8 for name in names)
    assert core.scheduler.num_preemptions == 0, "the tokens of all rows fit into the blocks"
    for plan in core.executor.plans:
        assert sum(plan.num_tokens) <= 6
    core.check_idle()


def test_a_row_waits_for_its_drafts_while_others_continue():
    core, _ = planted("right", steps_in_flight=3)
    core.add_request(request("a", [1, 2], 16), CLIENT)
    core.add_request(request("b", [3, 4], 16), CLIENT)
    run(core)
    plans = core.executor.plans
    for index, plan in enumerate(plans):
        slots = {plan.slots[row] for row in plan.drafts}
        for later in plans[index + 1 : index + 2]:
            both = slots & set(later.slots)
            # Its result was read before the next step that includes it, so that step starts after
            # it.
            for slot in both:
                row, after = plan.slots.index(slot), later.slots.index(slot)
                assert later.starts[after] > plan.starts[row]
    assert any(plan.drafts for plan in plans)


def test_a_draft_may_follow_a_token_in_flight():
    """A draft may follow a token in flight: the proposal begins with that token, which is on the
    device already."""
    core, _ = planted("right", steps_in_flight=2)
    wanted = request("r", [1, 2, 3], 12)
    core.add_request(wanted, CLIENT)
    core.step()  # both steps are submitted, and the first is read
    second = core.executor.plans[1]
    assert second.drafts == {0: expected(wanted)[1 : 1 + row_drafts.FIRST_LENGTH]}
    assert token_ids(run(core)["r"]) == expected(wanted)[1:]


def test_engines_in_lockstep_continue_while_drafts_are_in_flight():
    core, _ = planted("right")
    core.add_request(request("r", [1, 2, 3], 12), CLIENT)
    core.step()
    assert core.executor.plans[-1].drafts, "and its result is not read"
    assert core.scheduler.wants_step and core.scheduler.schedule() is None


def test_extras_of_an_answer_that_finishes_within_a_step_are_cut() -> None:
    """An output that finishes within a step has one extra for each token that is kept; a single
    token has all extras, also those of its prompt."""
    prompt = PromptLogprobs(1, [[5]], [[-1.0]], [1])
    of_tokens = [TokenLogprobs([token], [-1.0], 1) for token in (5, 6, 7)]
    one = Request(request("r", [1, 2], 1), CLIENT, 0, 0, 0.0)
    one.pending = 1
    assert one.append([5], [prompt, of_tokens[0]]).extras == [prompt, of_tokens[0]]
    two = Request(request("r", [1, 2], 2), CLIENT, 0, 0, 0.0)
    two.pending = 1
    output = two.append([5, 6, 7], of_tokens)
    assert (output.new_token_ids, output.extras) == ([5, 6], of_tokens[:2])
    assert output.finish_reason is FinishReason.LENGTH and two.token_ids.tolist() == [1, 2, 5, 6]
