"""The sampler between logits and states; tests/kernels/test_sample.py tests the sampling itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swell.kernels.sample import sample_tokens, uniform_noise
from swell.worker.sample import sampler as module
from swell.worker.sample.sampler import Sampler
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import NewRequest, SchedulerOutput

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCAB = 40


def setup(rows: list[NewRequest]) -> tuple[Sampler, InputBatch]:
    """Returns a sampler and a batch that computes all rows to their end and samples for each."""
    states, blocks = RequestStates(16, 32, CPU), BlockTables(16, 32, 16, CPU)
    sampler = Sampler(states, VOCAB)
    for row in rows:
        states.stage(row)
        sampler.add_request(row)
    states.apply()
    plan = SchedulerOutput(
        0,
        slots=[row.slot for row in rows],
        starts=[0 for _ in rows],
        num_tokens=[len(row.token_ids) for row in rows],
        samples=[True for _ in rows],
    )
    return sampler, BatchBuilder(states, blocks, 256).build(plan)


def draw(rows: list[NewRequest], logits: torch.Tensor) -> list[int]:
    sampler, batch = setup(rows)
    return sampler(logits.clone(), batch).tokens.tolist()


ROWS = [
    NewRequest(3, [1, 2], 2, [], SamplerParams(temperature=1.0, seed=5)),
    NewRequest(0, [1, 2, 3], 1, [], SamplerParams()),
    NewRequest(7, [4], 1, [], SamplerParams(temperature=0.7, top_k=4, seed=-9)),
    NewRequest(1, [4, 5], 2, [], SamplerParams(temperature=2.0, top_p=0.5, min_p=0.1, seed=5)),
]


def test_each_row_uses_its_own_columns():
    torch.manual_seed(0)
    logits = torch.randn(len(ROWS), VOCAB)
    got = draw(ROWS, logits)
    for i, row in enumerate(ROWS):
        params = row.sampler
        u = uniform_noise(torch.tensor([params.seed]), torch.tensor([len(row.token_ids)]))
        wanted, _ = sample_tokens(
            logits[i : i + 1],
            torch.tensor([params.temperature]),
            torch.tensor([params.top_k]),
            torch.tensor([params.top_p]),
            torch.tensor([params.min_p]),
            u,
        )
        assert got[i] == wanted.item()


def test_the_batch_does_not_matter():
    """The same seed samples the same token by itself, in another order, and in another slot."""
    torch.manual_seed(0)
    logits = torch.randn(len(ROWS), VOCAB)
    together = draw(ROWS, logits)
    order = [2, 0, 3, 1]
    assert draw([ROWS[i] for i in order], logits[order]) == [together[i] for i in order]
    for i, row in enumerate(ROWS):
        moved = NewRequest(9, row.token_ids, row.prompt_tokens, [], row.sampler)
        assert draw([moved], logits[i : i + 1]) == [together[i]]


def test_resumption_does_not_matter():
    """Output tokens that come back as known tokens do not change the noise of the next token."""
    torch.manual_seed(0)
    logits, params = torch.randn(1, VOCAB), SamplerParams(temperature=1.5, seed=77)
    fresh = NewRequest(0, [1, 2, 3, 4], 4, [], params)
    resumed = NewRequest(0, [1, 2, 3, 4], 2, [], params)
    assert draw([fresh], logits) == draw([resumed], logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("outputs", "held_back"), [(0, True), (2, True), (3, False)])
def test_min_tokens(temperature, outputs, held_back):
    logits = torch.zeros(2, VOCAB)
    logits[:, 11], logits[:, 12] = 90.0, 80.0
    logits[:, 30] = 40.0
    params = SamplerParams(temperature=temperature)
    held = NewRequest(0, [1] * (5 + outputs), 5, [], params, min_tokens=3, end_token_ids=[11, 12])
    free = NewRequest(1, [1] * 6, 5, [], params, end_token_ids=[11, 12])
    assert draw([held, free], logits) == [30 if held_back else 11, 11]


def test_unused_parameters_cost_nothing(monkeypatch):
    def never(*args, **options):
        raise AssertionError("not needed by this batch")

    sorted_ = []
    real = module.sample_tokens

    def watch(*args, any_top_k_or_p):
        sorted_.append(any_top_k_or_p)
        return real(*args, any_top_k_or_p=any_top_k_or_p)

    logits = torch.randn(4, VOCAB)
    monkeypatch.setattr(module, "sample_tokens", watch)
    draw(ROWS[:2], logits[:2])
    draw(ROWS[:3], logits[:3])
    draw(ROWS, logits)
    assert sorted_ == [False, True, True]
    # The filters of a greedy row do not cause sampling.
    monkeypatch.setattr(module, "sample_tokens", never)
    monkeypatch.setattr(module, "uniform_noise", never)
    greedy = NewRequest(5, [1], 1, [], SamplerParams(top_k=3, top_p=0.1, min_p=0.5))
    assert draw([ROWS[1], greedy], logits[:2]) == logits[:2].argmax(-1).tolist()


def test_seeds_of_64_bits():
    states = RequestStates(4, 8, CPU)
    for slot, seed in enumerate([(1 << 64) - 1, -1, 1 << 63, (1 << 63) - 1]):
        states.stage(NewRequest(slot, [1], 1, [], SamplerParams(seed=seed)))
    states.apply()
    seeds = np.array([-1, -1, -(1 << 63), (1 << 63) - 1])
    assert states.int_params[:, 1].tolist() == seeds.tolist()
