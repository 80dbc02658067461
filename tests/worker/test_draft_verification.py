"""Rejection sampling with drafts: the kept samples of a step, by definition and in both
implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.logprobs import LogprobsTensors
from swell.worker.draft_verification import StepDrafts
from swell.worker.sample.logprobs import PendingLogprobs
from swell.worker.sample.sampler import SamplerOutput
from swell.worker.sampler_wire import TokenLogprobs
from swell.worker.wire import ModelRunnerOutput, SchedulerOutput


@st.composite
def steps(draw):
    """Returns a plan, the tokens sampled in it, and the samples whose draft is refused. There are
    few distinct tokens, so that drafts are often right."""
    rows = draw(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=5)), max_size=6))
    drafts = {row: tokens for row, tokens in enumerate(rows) if tokens}
    samples = [0 if tokens is None else 1 + len(tokens) for tokens in rows]
    plan = SchedulerOutput(1, slots=[*range(len(rows))], samples=samples, drafts=drafts)
    sampled = [draw(st.integers(0, 1)) for _ in range(sum(samples))]
    refused = draw(st.sets(st.integers(0, max(0, sum(samples) - 1)), max_size=2))
    return plan, sampled, refused


def by_definition(plan, sampled, refused) -> list[list[int]]:
    """Returns the kept samples of each row."""
    kept, first = [], 0
    for row, count in enumerate(plan.samples):
        drafts, own = plan.drafts.get(row, []), list(range(first, first + count))
        right = 0
        while right < len(drafts) and (
            sampled[own[right]] == drafts[right] and own[right + 1] not in refused
        ):
            right += 1
        kept.append(own[: right + 1])
        first += count
    return kept


@settings(max_examples=300, deadline=None)
@given(step=steps())
def test_a_sample_is_kept_if_all_drafts_before_it_were_sampled(step):
    plan, sampled, refused = step
    drafts = StepDrafts(plan)
    wanted = by_definition(*step)
    for row, count in enumerate(plan.samples):
        first = sum(plan.samples[:row])
        assert drafts.offsets_np[first : first + count].tolist() == list(range(count))
        for offset in range(1, count):
            assert drafts.token(first + offset) == plan.drafts[row][offset - 1]
    for sample in refused:
        if len(drafts.offsets_np) and drafts.offsets_np[sample]:
            drafts.refuse(sample)
    if not plan.drafts:
        return
    accepted = drafts.accepted(sampled)
    assert accepted == {row: len(wanted[row]) - 1 for row in plan.drafts}
    flat = {sample for row in wanted for sample in row}
    kept = [sample in flat for sample in range(len(sampled))]
    assert drafts.kept(accepted) == kept
    assert drafts.kept_on_device(torch.tensor(sampled)).tolist() == kept


def test_the_drafts_before_some_samples_are_found():
    plan = SchedulerOutput(
        1, slots=[0, 1, 2], samples=[3, 1, 2], drafts={0: [7, 8], 2: [9]}
    )  # samples 0 1 2 | 3 | 4 5
    index, tokens = StepDrafts(plan).before(np.array([0, 1, 2, 3, 5]))
    assert list(zip(index.tolist(), tokens.tolist(), strict=True)) == [
        (1, 7),
        (2, 7),
        (2, 8),
        (4, 9),
    ]


class Batch:
    """The fields of an `InputBatch` that an output reads."""

    def __init__(self, plan: SchedulerOutput) -> None:
        self.drafts = StepDrafts(plan)
        self.sample_rows_np = np.repeat(np.arange(len(plan.samples)), plan.samples)


NAN = float("nan")


@pytest.mark.parametrize("first_sample", [0, 1], ids=["both rows", "the row with drafts"])
def test_samples_after_a_wrong_draft_are_dropped_even_if_nan(first_sample):
    """Samples after a wrong draft are dropped, also if their logits are NaN, as those of the last
    two are. The log probabilities are those of all samples, or of one row's."""
    plan = SchedulerOutput(1, slots=[4, 5], samples=[1, 4], drafts={1: [7, 8, 9]})
    tokens = torch.tensor([3, 7, 1, 9, 2])
    values = torch.tensor([-0.5, -1.5, -2.5, NAN, NAN])
    samples = list(range(first_sample, 5))
    ranked = LogprobsTensors(tokens[:, None], values[:, None], torch.arange(1, 6))
    pending = PendingLogprobs(
        LogprobsTensors(
            *(column[samples] for column in ranked[:3]), [[0, 1, 5], [0, 4]][first_sample]
        ),
        samples,
        [[0, 1], [1]][first_sample],
        [0] * (2 - first_sample),
    )
    sampled = SamplerOutput(Batch(plan), tokens, torch.tensor([0.0, 0.0, 0.0, NAN, NAN]), [pending])
    output = sampled.to_cpu_nonblocking().fill(ModelRunnerOutput(1))
    assert output.sampled_token_ids == [3, 7, 1]
    assert output.accepted == {1: 1}
    kept = {
        0: [TokenLogprobs([3], [-0.5], 1)],
        1: [TokenLogprobs([7], [-1.5], 2), TokenLogprobs([1], [-2.5], 3)],
    }
    assert output.extras == {row: kept[row] for row in range(first_sample, 2)}
    assert output.rows_with_nans == []


def test_a_kept_nan_sample_fails_its_row():
    plan = SchedulerOutput(1, slots=[4], samples=[2], drafts={0: [7]})
    sampled = SamplerOutput(Batch(plan), torch.tensor([7, 1]), torch.tensor([0.0, float("inf")]))
    assert sampled.fill(ModelRunnerOutput(1)).rows_with_nans == [0]
