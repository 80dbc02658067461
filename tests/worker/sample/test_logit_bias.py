"""Boundary cases of bans: words across boundaries, contradicting parameters, odd shapes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from swell.configs.schema import ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.sample import allowed_token_ids as allowed
from swell.worker.sample.logits_processor import BANNED_BIAS
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import NewRequest, SchedulerOutput
from tests.kernels.load import load_backend
from tests.worker.sample.reference_sampler import ReferenceRow
from tests.worker.sample.sampler_harness import EVERYTHING, NOTHING, VOCAB, SamplerHarness
from tests.worker.step import test_model_runner as runner_parts

pytestmark = pytest.mark.slow


def test_bad_words_are_banned_as_in_transformers():
    """Bad words are banned as in transformers, over random contexts of few tokens. Contexts are at
    least as long as the longest word: transformers skips words in shorter ones."""
    draws = random.Random(0)
    words = [[draws.randrange(3) for _ in range(size)] for size in (1, 2, 2, 3, 3, 4)]
    processor = NoBadWordsLogitsProcessor(words)
    for _ in range(40):
        known = [draws.randrange(3) for _ in range(draws.randrange(4, 9))]
        split = draws.randrange(1, len(known))
        harness, logits = SamplerHarness(), torch.zeros(1, VOCAB)
        params = SamplerParams(bad_words=words)
        harness.take({0: ReferenceRow(params, known[:split], known[split:])})
        wanted = processor(torch.tensor([known]), logits.clone()) == -torch.inf
        after, _ = harness.step([0], logits)
        assert torch.equal(after <= BANNED_BIAS, wanted)


@pytest.mark.parametrize("prompt", [[9], [9, 1], [9, 1, 2], [9, 1, 2, 3]])
def test_a_bad_word_may_begin_in_the_prompt(prompt):
    """A bad word may begin in the prompt. The model would continue with [1, 2, 3], wherever the
    prompt ends."""
    word = [1, 2, 3]
    row = ReferenceRow(SamplerParams(bad_words=[word]), list(prompt))
    harness = SamplerHarness()
    harness.take({0: row})
    for token in [9, 1, 2, 3, 8][len(prompt) :]:
        logits = torch.zeros(1, VOCAB)
        logits[0, token], logits[0, 30] = 5.0, 1.0
        harness.step([0], logits)
    free = [9, 1, 2, 3, 8]
    assert row.known == (free if prompt[-3:] == word else [9, 1, 2, 30, 8])


def test_a_word_longer_than_the_known_tokens_does_not_match():
    """A word longer than all known tokens does not match before the prompt. The slot held [7, 1, 2]
    before; positions before the prompt match nothing."""
    harness = SamplerHarness()
    harness.take({0: ReferenceRow(NOTHING, [7, 1, 2])})
    harness.take({0: ReferenceRow(SamplerParams(bad_words=[[0, 1, 3], [1, 1, 5], [1, 4]]), [1])})
    logits = torch.randn(1, VOCAB)
    after, _ = harness.step([0], logits)
    changed = torch.nonzero(after != logits)
    assert changed.tolist() == [[0, 4]]


IMPOSSIBLE = [
    # Combinations of bans: (params, ends, token that the grammar leaves, tokens that
    # may be sampled)
    (SamplerParams(bad_words=[[t] for t in range(VOCAB)]), [], None, set(range(VOCAB))),
    (SamplerParams(bad_words=[[5]], allowed_token_ids=[5]), [], None, {5}),
    (SamplerParams(bad_words=[[5], [6], [6]], allowed_token_ids=[5, 6]), [5], None, {5, 6}),
    (SamplerParams(allowed_token_ids=[5]), [5], None, {5}),
    (SamplerParams(bad_words=[[4]]), [], 4, {4}),
    (SamplerParams(bad_words=[[4]], allowed_token_ids=[5]), [4], 4, {4}),
    (SamplerParams(logit_bias={4: -100.0}), [4], 4, {4}),
]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("params", "ends", "left", "possible"), IMPOSSIBLE)
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
def test_the_only_allowed_token_is_sampled(backend, params, ends, left, possible, temperature):
    """Contradicting parameters still yield a token, the one that violates the fewest of them. A
    token that the grammar excludes is never sampled, with any filters."""
    sample = load_backend(backend, "sample")
    harness = SamplerHarness()
    harness.take({0: ReferenceRow(params, [1, 2], min_tokens=9, ends=ends)})
    torch.manual_seed(0)
    after, _ = harness.step([0], torch.randn(1, VOCAB) * 3)
    if left is not None:  # as a grammar's mask would do
        after[:, torch.arange(VOCAB) != left] = -torch.inf
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.1, 0.0), (0, 1.0, 0.5)]:
        row = [torch.tensor([x]) for x in (temperature, top_k, top_p, min_p)]
        for u in (0.0, 0.37, 1 - 2**-53):
            token, _ = sample.sample_tokens(after, *row, torch.tensor([u], dtype=torch.float64))
            assert token.item() in possible


def test_many_bans_of_one_token_weigh_less_than_a_disallowed_token():
    """Many bans of one token weigh less than not being allowed: as many bans as a request may
    have."""
    harness = SamplerHarness()
    words = [[5]] * 512
    harness.take({0: ReferenceRow(SamplerParams(bad_words=words, allowed_token_ids=[5]), [1])})
    _, tokens = harness.step([0], torch.randn(1, VOCAB))
    assert tokens == [5]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_packed_bits(vocab):
    ids = [t for t in range(vocab) if t % 3 == 0 or t == vocab - 1]
    packed = allowed.packed_bits(ids, vocab)
    assert packed.dtype == np.int32
    assert len(packed) == -(-vocab // 32)
    assert [t for t in range(32 * len(packed)) if int(packed[t // 32]) >> t % 32 & 1] == ids


def test_logits_may_be_a_part_of_a_wider_tensor():
    """Logits may be a slice of a wider tensor, such as a vocabulary that was padded for tensor
    parallelism."""
    harness = SamplerHarness()
    harness.take({0: ReferenceRow(EVERYTHING, [1, 2]), 1: ReferenceRow(EVERYTHING, [4])})
    wide = torch.randn(2, VOCAB + 3)
    tail, logits = wide[:, VOCAB:].clone(), wide[:, :VOCAB]
    wanted = [harness.rows[slot].logits(row) for slot, row in enumerate(logits.tolist())]
    harness.sampler(logits, harness.batch([0, 1]))
    assert logits.tolist() == wanted
    assert torch.equal(wide[:, VOCAB:], tail)


def test_a_ban_outweighs_any_bias_and_touches_no_other_token():
    harness = SamplerHarness()
    harness.take({0: ReferenceRow(SamplerParams(bad_words=[[3]], logit_bias={3: 100.0}), [1])})
    after, _ = harness.step([0], torch.zeros(1, VOCAB))
    assert after[0, 3] == torch.tensor(BANNED_BIAS)
    assert (after[0, :3] == 0).all()


def successor(row: ReferenceRow) -> list[float]:
    """Returns the logits of `runner_parts.SumModel` after the known tokens."""
    logits = [0.0] * runner_parts.VOCAB
    logits[runner_parts.expected(row.known, 1)[0]] = 1.0
    return logits


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_words_and_counts_across_chunks_and_steps(cut):
    """Words and counts are tracked across chunks and steps of the runner. A prompt in two parts,
    whose first part samples nothing, runs next to a request with outputs that takes the slot of
    another one. No result is read before the last step has been computed."""
    first, second = runner_parts.expected([11, 12, 13, 5], 2)
    prompts, outputs = [[11, 12, 13, 5], [1]], [[], [2]]
    params_of_rows = [
        SamplerParams(
            repetition_penalty=1.5,
            frequency_penalty=0.8,
            bad_words=[[13, 5, first], [5, 0], [second], [1, 2]],
        ),
        SamplerParams(presence_penalty=1.2, logit_bias={4: 0.25}, bad_words=[[1, 2, 4], [0, 0]]),
    ]
    rows = [
        ReferenceRow(*parts)
        for parts in zip(params_of_rows, prompts, map(list, outputs), strict=True)
    ]
    sizes = [len(row.known) for row in rows]
    plans = [
        SchedulerOutput(0, 0, [NewRequest(2, [90], 1, [], EVERYTHING)], [], [2], [0], [1], [True]),
        SchedulerOutput(
            1,
            0,
            [rows[0].new_request(0), rows[1].new_request(2)],
            slots=[2, 0],
            starts=[0, 0],
            num_tokens=[sizes[1], cut],
            samples=[True, False],
        ),
        SchedulerOutput(
            2,
            slots=[2, 0],
            starts=[sizes[1], cut],
            num_tokens=[1, sizes[0] - cut],
            samples=[True, True],
        ),
    ]
    for i in range(5):
        starts = [sizes[1] + i + 1, sizes[0] + i]
        plans.append(
            SchedulerOutput(
                3 + i, slots=[2, 0], starts=starts, num_tokens=[1, 1], samples=[True, True]
            )
        )
    runner = runner_parts.make_runner(Mesh.build(ParallelConfig(), 0))
    results = [runner.execute_model(plan) for plan in plans]
    tokens = [result.get_output().sampled_token_ids for result in results][1:]
    for row, column, count in ((rows[1], 0, 7), (rows[0], 1, 6)):
        for _ in range(count):
            row.outputs.append(int(np.argmax(row.logits(successor(row)))))
        assert [step[column] for step in tokens if column < len(step)] == row.outputs[-count:]
    # The parameters must have an effect, or the test would check nothing.
    for row, prompt, given in zip(rows, prompts, outputs, strict=True):
        free = runner_parts.expected(prompt + given, len(row.outputs) - len(given))
        assert row.outputs != given + free
    assert rows[0].outputs[0] not in (first, 0)
