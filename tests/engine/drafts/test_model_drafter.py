"""Drafts by a draft model: what is requested and accepted, and that the draft cache has every token
it needs. The fake worker's draft model is always right where it has computed every token."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest

from swell.configs.drafts import MAX_DRAFTS
from swell.engine import row_drafts
from swell.engine.core import EngineCore
from swell.engine.scheduling.model_drafter import ProposedTokens
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.engine.conservation import check_blocks
from tests.engine.executor.fake_worker import expected, make_core, regroup, run, token_ids

CLIENT = b"ingress"


def drafting(max_tokens: int = 7, max_step_tokens: int = 48, **options: object) -> EngineCore:
    drafts = {"method": "model", "model": {"path": "small"}}
    drafts |= {"max_tokens": max_tokens, "max_step_tokens": max_step_tokens}
    return make_core(drafts=drafts, **options)


def request(name: str, prompt: list[int], outputs: int = 20, **extra: object) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplerParams(seed=3), outputs, **extra)


def assert_all_right(core: EngineCore) -> None:
    assert core.scheduler.drafter.num_drafts == core.scheduler.drafter.num_accepted > 0


def answer(core: EngineCore, *wanted: EngineCoreRequest) -> list[int]:
    """Runs requests and checks their answers; returns the number of cached prompt tokens of
    each."""
    for one in wanted:
        assert core.add_request(one, CLIENT) is None
    outputs = run(core)
    for one in wanted:
        assert token_ids(outputs[one.request_id]) == expected(one)
    check_blocks(core.scheduler.kv.pool)
    return [outputs[one.request_id][0].num_cached_tokens for one in wanted]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [0, 3])
def test_proposals_become_drafts_of_the_next_step(depth: int, chunk: int) -> None:
    core = drafting(4, steps_in_flight=depth, max_chunk_tokens=chunk)
    answer(core, request("r", [1, 2, 3, 4, 5], 41))
    assert_all_right(core)
    drafts = [len(tokens) for plan in core.executor.plans for tokens in plan.drafts.values()]
    assert drafts[0] == row_drafts.FIRST_LENGTH and drafts[1:-1] == [4] * len(drafts[1:-1])
    asked = [count for plan in core.executor.plans for count in plan.proposals.values()]
    assert asked[0] == row_drafts.FIRST_LENGTH + depth - 1, "the first come behind tokens in flight"
    assert len(asked) <= len(drafts) + 1, "no row asks again before the answer"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("block_tokens", [1, 4])
def test_cached_blocks_serve_the_draft_model_too(depth: int, block_tokens: int) -> None:
    core = drafting(steps_in_flight=depth, block_tokens=block_tokens, num_blocks=200)
    first = request("first", [1, 2, 3, 4, 5], 19)
    answer(core, first)
    tokens = [*first.prompt_token_ids, *expected(first)]
    found = answer(core, request("second", [*tokens, 9, 9], 20), request("third", tokens, 20))
    assert found[1] == (len(tokens) - 1) // block_tokens * block_tokens <= found[0]
    assert_all_right(core)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_continue_with_correct_proposals(depth: int, caching: bool) -> None:
    core = drafting(num_blocks=12, max_model_len=48, steps_in_flight=depth, prefix_caching=caching)
    answer(core, *(request(f"r{i}", [i, 2, 3, 4], 30) for i in range(4)))
    assert core.scheduler.num_preemptions
    assert_all_right(core)


@pytest.mark.parametrize("offload", [(60, 0), (0, 60), (3, 60)])
def test_loaded_blocks_include_the_part_of_the_draft_model(offload: tuple[int, int]) -> None:
    core = drafting(num_blocks=10, max_model_len=36, offload_blocks=offload, steps_in_flight=2)
    for turn in "ab":
        for first in range(6):
            prompt = [(7 * first + i) % 50 for i in range(17)]
            answer(core, request(f"{turn}{first}", prompt, 12))
    assert core.scheduler.kv.offload.num_loaded
    assert_all_right(core)


def test_a_migrated_request_continues_with_correct_proposals() -> None:
    whole = expected(request("r", [1, 2, 3], 30))
    for done in range(1, 29):
        core = drafting()
        moved = request("r", [1, 2, 3], 30, output_token_ids=whole[:done])
        assert core.add_request(moved, CLIENT) is None
        assert token_ids(run(core)["r"]) == whole[done:]
        core.check_idle()
        drafts = core.scheduler.drafter
        assert drafts.num_drafts == drafts.num_accepted and (drafts.num_drafts or done > 26)


def test_proposals_of_lost_steps_are_forgotten() -> None:
    core = drafting(steps_in_flight=2)
    wanted = request("r", [1, 2, 3], 40)
    core.add_request(wanted, CLIENT)
    tokens: list[int] = []
    for step in range(60):
        if step % 5 == 4:
            regroup(core)
        for outputs in core.step().values():
            tokens += token_ids(outputs)
    assert tokens == expected(wanted) and not core.has_work
    assert_all_right(core)


def test_the_drafter_proposes_for_no_more_rows_than_the_limit() -> None:
    core = drafting(max_step_tokens=3)
    answer(core, *(request(f"r{i}", [i, 1], 12) for i in range(8)))
    for plan in core.executor.plans:
        assert not plan.proposals or len(plan.slots) < 3


def test_proposals_use_no_block_that_another_row_needs() -> None:
    core = drafting(num_blocks=11)
    answer(core, *(request(f"r{i}", [i, 5], 8) for i in range(4)))
    assert core.scheduler.num_preemptions == 0, "the tokens of all rows fit into the blocks"


def test_wrong_proposals_shorten_and_then_pause_drafting() -> None:
    core = drafting(max_model_len=300, num_blocks=100, steps_in_flight=1)
    worker, wanted = core.executor.worker, request("r", [1, 2, 3], 150)
    propose = worker.propose
    worker.propose = lambda *args: {
        row: [(token + 1) % 50 for token in proposed] for row, proposed in propose(*args).items()
    }
    answer(core, wanted)
    drafts = [len(tokens) for plan in core.executor.plans for tokens in plan.drafts.values()]
    assert drafts[0] == row_drafts.FIRST_LENGTH and set(drafts[1:]) == {1}
    steps = [step for step, plan in enumerate(core.executor.plans) if plan.drafts]
    pauses = [later - earlier - 1 for earlier, later in pairwise(steps)]
    first = row_drafts.FIRST_PAUSE
    assert pauses[:4] == [0, first, 2 * first, 4 * first]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("outputs", range(40, 62))
def test_no_proposal_exceeds_the_longest_sequence(depth: int, outputs: int) -> None:
    core = drafting(7, max_model_len=64, steps_in_flight=depth)
    answer(core, request("r", [1, 2], outputs))
    assert_all_right(core)
    plans = core.executor.plans
    added = [blocks.block_ids for plan in plans for blocks in plan.new_blocks]
    (row,) = (row for plan in plans for row in plan.new_requests)
    assert len(row.block_ids) + sum(map(len, added)) <= -(-(2 + outputs) // 4)


def test_a_proposal_is_used_as_far_as_the_row_agrees() -> None:
    proposed = ProposedTokens()
    assert proposed.propose(array("q", [1, 2]), 3) == []
    proposed.receive([5, 6, 7, 8], 2)
    assert proposed.propose(array("q", [1, 2]), 3) == [5, 6, 7]
    assert proposed.propose(array("q", [1, 2, 5, 6]), 3) == [7, 8]
    assert proposed.propose(array("q", [1, 2, 5, 9]), 3) == []
    assert proposed.propose(array("q", [1, 2, 5, 6, 7, 8, 9]), 3) == []


class _Prompt(array):  # type: ignore[type-arg]
    """A long prompt whose slices must not be read."""

    def __getitem__(self, index: Any) -> Any:
        taken = super().__getitem__(index)
        assert len(taken) <= MAX_DRAFTS
        return taken


def test_a_row_without_a_proposal_does_not_recompute_its_tokens() -> None:
    proposer = ProposedTokens()
    tokens = _Prompt("q", range(1000))
    assert proposer.propose(tokens, 3) == []
    proposer.receive([998, 999, 5, 6], 998)
    assert proposer.propose(tokens, 3) == [5, 6]
