"""Log probabilities against plain arithmetic, one row and one position at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.worker.sample import logprobs as module
from swell.worker.sample.logprobs import PromptLogprobsReader, SampledLogprobs, rank_tokens
from swell.worker.sample.sampler import SamplerOutput
from swell.worker.sampler_wire import Extra, PromptLogprobs, SamplerParams, TokenLogprobs
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import ModelRunnerOutput, NewRequest, SchedulerOutput

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SLOTS, LENGTH, VOCAB = 6, 40, 23


def plain(logits: list[float], token_id: int, top: int) -> tuple[list[float], int, list[float]]:
    """Returns the log probabilities of the token and of the most likely ones, its rank, and the
    most likely logits."""
    total = math.log(sum(math.exp(x) for x in logits))
    best = sorted(logits, reverse=True)[:top]
    rank = 1 + sum(x > logits[token_id] for x in logits)
    return [logits[token_id] - total, *(x - total for x in best)], rank, best


def check(logits: torch.Tensor, token_id: int, top: int, reported: TokenLogprobs) -> None:
    wanted, rank, best = plain(logits.double().tolist(), token_id, top)
    assert reported.token_ids[0] == token_id
    assert reported.logprobs == pytest.approx(wanted, abs=1e-5)
    assert reported.rank == rank
    assert logits[reported.token_ids[1:]].double().tolist() == best


def extras(sampled: SamplerOutput) -> dict[int, list[Extra]]:
    return sampled.to_cpu_nonblocking().fill(ModelRunnerOutput(0)).extras


def params(sampled: int | None, prompt: int | None) -> SamplerParams:
    return SamplerParams(logprobs=sampled, prompt_logprobs=prompt)


NUM_LOGPROBS = st.one_of(st.none(), st.integers(0, 30))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 30), st.randoms(use_true_random=False))
def test_ranks_and_logprobs(rows: int, top: int, rng) -> None:
    """Equal logits have the same rank; a vocabulary smaller than `top` is reported completely."""
    logits = torch.tensor(
        [[rng.choice([-3.5, -1.0, 0.0, 0.25, 2.0, 9.0]) for _ in range(VOCAB)] for _ in range(rows)]
    )
    token_ids = torch.tensor([rng.randrange(VOCAB) for _ in range(rows)])
    ranked = rank_tokens(logits, token_ids, top)
    assert ranked.logprob_token_ids.shape == (rows, 1 + min(top, VOCAB))
    for row, of_row in enumerate(zip(*ranked.tolists()[:3], strict=True)):
        check(logits[row], int(token_ids[row]), top, TokenLogprobs(*of_row))


def test_impossible_tokens_have_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    _, logprobs, ranks, _ = rank_tokens(logits, torch.tensor([1]), 2).tolists()
    assert ranks == [3]
    assert logprobs[0] == pytest.approx([-math.inf, math.log(0.5), math.log(0.5)])


def test_a_nearly_certain_token_keeps_its_digits() -> None:
    """A nearly certain token keeps its digits: its log probability is far below the rounding of its
    logit."""
    logits = torch.tensor([[1000.0, 984.0, 984.0]])
    ranked = rank_tokens(logits, torch.tensor([0]), 0)
    assert ranked.logprobs.item() == pytest.approx(-math.log1p(2 * math.exp(-16)), rel=0.1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[NewRequest], SchedulerOutput]:
    """Returns rows in slots, computed from any start to any end; some are within their prompts,
    some have outputs."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    rng = draw(st.randoms(use_true_random=False))
    rows, starts, counts, samples = [], [], [], []
    for slot in slots:
        length = draw(st.integers(1, LENGTH))
        start = draw(st.integers(0, length - 1))
        to_the_end = draw(st.booleans())
        counts.append(length - start if to_the_end else draw(st.integers(1, length - start)))
        starts.append(start)
        samples.append(start + counts[-1] == length)
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        sampling = params(draw(NUM_LOGPROBS), draw(NUM_LOGPROBS))
        rows.append(NewRequest(slot, ids, draw(st.integers(1, length)), [], sampling))
    return rows, SchedulerOutput(0, slots=slots, starts=starts, num_tokens=counts, samples=samples)


def begin(rows: list[NewRequest], plan: SchedulerOutput) -> tuple[RequestStates, InputBatch]:
    states, blocks = RequestStates(SLOTS, LENGTH, CPU), BlockTables(SLOTS, LENGTH, 4, CPU)
    for row in rows:
        states.stage(row)
        blocks.stage_set(row.slot, list(range(LENGTH // 4)))
    states.apply()
    blocks.apply()
    return states, BatchBuilder(states, blocks, 256).build(plan)


class Head:
    """A model whose hidden states are its logits, and which records the number of rows of each
    call."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden))
        return hidden


@settings(max_examples=80, deadline=None)
@given(steps(), st.integers(1, 50))
def test_prompt_logprobs_of_each_position(step, at_once: int) -> None:
    rows, plan = step
    states, batch = begin(rows, plan)
    head, hidden = Head(), torch.randn(batch.num_tokens, VOCAB)
    reader = PromptLogprobsReader(head, states)
    for row in rows:
        # The previous request of the slot used every parameter.
        reader.add_request(NewRequest(row.slot, [1] * LENGTH, LENGTH, [], params(None, 20)))
        reader.add_request(row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_POSITIONS", at_once)
        reads = reader.reads(plan)
        nothing = batch.sample_slots[:0]
        sampled = SamplerOutput(
            batch, nothing, nothing, reader(hidden, batch, plan) if reads else []
        )
    given_out = extras(sampled)
    first = total = 0
    for place, row in enumerate(rows):
        start, count = plan.starts[place], plan.num_tokens[place]
        behind = range(start + 1, min(start + count, row.prompt_tokens - 1) + 1)
        top = row.sampler.prompt_logprobs
        if top is None or not behind:
            assert place not in given_out
        else:
            (reported,) = given_out[place]
            assert isinstance(reported, PromptLogprobs)
            assert (reported.start, len(reported.ranks)) == (behind.start, len(behind))
            columns = zip(reported.token_ids, reported.logprobs, reported.ranks, strict=True)
            for offset, (position, of_one) in enumerate(zip(behind, columns, strict=True)):
                one = TokenLogprobs(*of_one)
                check(hidden[first + offset], row.token_ids[position], top, one)
            total += len(behind)
        first += count
    assert reads == (total > 0)
    assert sum(head.num_rows) == total
    assert max(head.num_rows, default=0) <= at_once
    assert len(head.num_rows) == -(-total // at_once)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_sampled_logprobs_use_unmodified_logits(step) -> None:
    rows, plan = step
    states, batch = begin(rows, plan)
    of_drawn = SampledLogprobs(states)
    for row in rows:
        of_drawn.add_request(NewRequest(row.slot, [1], 1, [], params(20, None)))
        of_drawn.add_request(row)
    logits = torch.randn(batch.num_samples, VOCAB)
    own, tokens = logits.clone(), torch.randint(VOCAB, (batch.num_samples,))
    kept = of_drawn.keep_raw(logits, batch, will_change=True)
    logits.fill_(-1e30)  # as pipeline stages do
    given_out = extras(SamplerOutput(batch, tokens, tokens, [some.rank(tokens) for some in kept]))
    num_requested = 0
    for sample, place in enumerate(batch.sample_rows_np.tolist()):
        top = rows[place].sampler.logprobs
        if top is None:
            assert place not in given_out
            continue
        num_requested += 1
        (reported,) = given_out[place]
        assert isinstance(reported, TokenLogprobs)
        check(own[sample], int(tokens[sample]), top, reported)
    assert len(given_out) == num_requested
    assert sum(len(some.logits) for some in kept) == num_requested, "only these rows are copied"


def test_nothing_is_computed_without_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: object) -> None:
        raise AssertionError("not needed by this batch")

    monkeypatch.setattr(module, "rank_tokens", never)
    monkeypatch.setattr(module, "to_device", never)
    prompt = list(range(10))
    # The second one requests logprobs of its prompt, which was computed before this step.
    rows = [
        NewRequest(2, prompt, 10, [], params(None, None)),
        NewRequest(0, prompt, 8, [], params(None, 3)),
    ]
    plan = SchedulerOutput(0, slots=[2, 0], starts=[0, 7], num_tokens=[10, 3], samples=[True, True])
    states, batch = begin(rows, plan)
    head = Head()
    reader, of_drawn = PromptLogprobsReader(head, states), SampledLogprobs(states)
    for row in rows:
        reader.add_request(row)
        of_drawn.add_request(row)
    assert not reader.reads(plan)
    assert of_drawn.keep_raw(torch.randn(2, VOCAB), batch, will_change=False) == []
    for mode in ("raw_logprobs", "processed_logprobs"):
        of_drawn = SampledLogprobs(states, mode)
        assert of_drawn.keep_processed(torch.randn(2, VOCAB), batch) == []
    assert not head.num_rows


def test_prompt_and_sampled_logprobs_of_a_row_are_sent_together() -> None:
    """The prompt's and the first token's log probabilities leave in the same step, next to a chunk
    that samples nothing."""
    rows = [
        NewRequest(1, [3, 4, 5], 3, [], params(1, 0)),
        NewRequest(4, [6] * 9, 9, [], params(1, 0)),
    ]
    plan = SchedulerOutput(0, slots=[1, 4], starts=[0, 2], num_tokens=[3, 4], samples=[True, False])
    states, batch = begin(rows, plan)
    reader, of_drawn = PromptLogprobsReader(Head(), states), SampledLogprobs(states)
    for row in rows:
        reader.add_request(row)
        of_drawn.add_request(row)
    hidden = torch.randn(7, VOCAB)
    kept = of_drawn.keep_raw(hidden[batch.logits_indices], batch, will_change=False)
    tokens = torch.tensor([7])
    pending_extras = [*reader(hidden, batch, plan), *(some.rank(tokens) for some in kept)]
    sampled = SamplerOutput(batch, tokens, tokens, pending_extras)
    output = sampled.fill(ModelRunnerOutput(0))
    assert output.sampled_token_ids == [7]
    assert {
        row: [type(extra) for extra in reported] for row, reported in output.extras.items()
    } == {
        0: [PromptLogprobs, TokenLogprobs],
        1: [PromptLogprobs],
    }
    assert [(reported[0].start, len(reported[0].ranks)) for reported in output.extras.values()] == [
        (1, 2),
        (3, 4),
    ]
    assert np.array_equal(batch.sample_rows_np, [0])
