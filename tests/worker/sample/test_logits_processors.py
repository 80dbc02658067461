"""Penalties, bias, bans and allowed tokens: the processors against `reference_sampler.py`, bit for
bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from swell.worker.sample import allowed_token_ids as allowed
from swell.worker.sample import logit_bias as edits
from swell.worker.sample import penalties
from swell.worker.sampler_wire import SamplerParams
from tests.worker.sample.reference_sampler import ReferenceRow
from tests.worker.sample.sampler_harness import EVERYTHING, NOTHING, ROWS, VOCAB, SamplerHarness

pytestmark = pytest.mark.slow

MAX_PROMPT = 6


# Few distinct tokens, so that words, repetitions and bans interact.
token_ids = st.integers(0, 5) | st.integers(0, VOCAB - 1)
token_lists = st.lists(token_ids, min_size=1, max_size=4)


@st.composite
def sampling_params(draw):
    """Returns the parameters of a row; each one is absent in most examples."""

    def maybe(strategy, otherwise):
        return draw(strategy) if draw(st.booleans()) else otherwise

    amounts = st.floats(-2, 2, width=32)
    return SamplerParams(
        temperature=maybe(st.sampled_from([0.3, 1.0, 2.0]), 0.0),
        top_k=maybe(st.integers(1, 9), 0),
        top_p=maybe(st.sampled_from([0.2, 0.9]), 1.0),
        min_p=maybe(st.sampled_from([0.05, 0.5]), 0.0),
        seed=draw(st.integers(0, 2**63 - 1)),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.3, 7.0]), 1.0),
        frequency_penalty=maybe(amounts, 0.0),
        presence_penalty=maybe(amounts, 0.0),
        logit_bias=maybe(
            st.dictionaries(token_ids, st.integers(-100, 100) | st.floats(-9, 9), max_size=4), {}
        ),
        bad_words=maybe(st.lists(token_lists, max_size=4), []),
        allowed_token_ids=maybe(token_lists, []),
    )


@st.composite
def requests(draw):
    """Returns a request that may have outputs, from another engine or from before a preemption."""
    return ReferenceRow(
        draw(sampling_params()),
        prompt=draw(st.lists(token_ids, min_size=1, max_size=MAX_PROMPT)),
        outputs=draw(st.lists(token_ids, max_size=4)),
        min_tokens=draw(st.integers(0, 6)),
        ends=draw(st.lists(token_ids, max_size=2)),
    )


slots = st.integers(0, ROWS - 1)
steps = st.lists(
    st.tuples(
        st.dictionaries(slots, requests(), max_size=3),
        st.lists(slots, unique=True, max_size=ROWS),
        st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_random_row_histories(history):
    """The logits and tokens of each row are those of the row by itself. Requests take slots, new or
    used before, with or without sampling in that step; any of them sample."""
    harness = SamplerHarness()
    for taken, wanted, seed in history:
        harness.take(taken)
        sampling = [slot for slot in wanted if slot in harness.rows]
        if not sampling:
            continue
        torch.manual_seed(seed)
        logits = torch.randn(len(sampling), VOCAB) * 3
        expected = [
            harness.rows[slot].logits(row)
            for slot, row in zip(sampling, logits.tolist(), strict=True)
        ]
        sampled = [harness.rows[s].sample(row) for s, row in zip(sampling, expected, strict=True)]
        after, tokens = harness.step(sampling, logits)
        assert torch.equal(after, torch.tensor(expected))
        assert tokens == sampled


@settings(max_examples=30, deadline=None)
@given(requests(), st.integers(1, 9), st.integers(0, 8), st.integers(0, 999))
def test_resumption_equals_having_drawn(request, count, moved_after, seed):
    """A resumed request equals an undisturbed one: it moves to another slot midway, with its
    outputs so far."""
    torch.manual_seed(seed)
    logits = torch.randn(count, 1, VOCAB) * 3
    stays = ReferenceRow(request.params, request.prompt, [], request.min_tokens, request.ends)
    moves = ReferenceRow(request.params, request.prompt, [], request.min_tokens, request.ends)
    harness = SamplerHarness()
    harness.take({0: stays, 1: moves})
    slot = 1
    for i in range(count):
        if i == moved_after:
            slot = 3
            harness.take({1: ReferenceRow(EVERYTHING, [1, 2, 3]), 3: moves})
        stayed, moved = harness.step([0], logits[i]), harness.step([slot], logits[i])
        assert torch.equal(stayed[0], moved[0])
    assert stays.outputs == moves.outputs


def test_a_row_does_not_depend_on_the_others():
    """A row's logits and tokens do not depend on other rows, even if these use every parameter."""
    torch.manual_seed(0)
    logits = torch.randn(4, 3, VOCAB) * 3
    for params in (NOTHING, EVERYTHING):
        alone, among = SamplerHarness(), SamplerHarness()
        alone.take({2: ReferenceRow(params, [1, 2, 4])})
        others = {0: ReferenceRow(EVERYTHING, [4, 1, 2]), 4: ReferenceRow(EVERYTHING, [5, 5])}
        among.take({**others, 2: ReferenceRow(params, [1, 2, 4])})
        for step in logits:
            wanted, _ = alone.step([2], step[1:2])
            got, _ = among.step([0, 2, 4], step)
            assert torch.equal(got[1:2], wanted)
        assert alone.rows[2].outputs == among.rows[2].outputs


PARAMS = [
    SamplerParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.4),
    SamplerParams(logit_bias={0: 1.5, 3: -0.75}),
    SamplerParams(
        repetition_penalty=1.2,
        frequency_penalty=-0.3,
        presence_penalty=0.9,
        logit_bias={2: 0.5, 6: -1.0},
        bad_words=[[1], [4, 5]],
    ),
    SamplerParams(presence_penalty=1.0, logit_bias={0: 2.0}, allowed_token_ids=[0, 2, 3, 7]),
]


@pytest.mark.parametrize("params", PARAMS)
def test_distribution(params):
    """A chi-square test of the tokens of many seeds in one batch, against the softmax of the
    reference in float64. There are 8 tokens, so at most 7 degrees of freedom, for which 24.3 is
    exceeded once in a thousand."""
    rows, logits = 4000, torch.tensor([0.3, 1.0, -1.0, 0.0, 1.5, 0.5, -0.5, 0.9])
    harness = SamplerHarness(rows)
    harness.take(
        {
            seed: ReferenceRow(
                SamplerParams(
                    temperature=0.9,
                    seed=seed,
                    repetition_penalty=params.repetition_penalty,
                    frequency_penalty=params.frequency_penalty,
                    presence_penalty=params.presence_penalty,
                    logit_bias=params.logit_bias,
                    bad_words=params.bad_words,
                    allowed_token_ids=params.allowed_token_ids,
                ),
                [2, 7, 6],
                [0, 3, 0, 4],
            )
            for seed in range(rows)
        }
    )
    defined = torch.tensor(harness.rows[0].logits(logits.tolist()), dtype=torch.float64)
    expected = torch.softmax(defined / 0.9, 0) * rows
    _, tokens = harness.step(list(range(rows)), logits.repeat(rows, 1))
    observed = torch.bincount(torch.tensor(tokens), minlength=8)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    assert ((observed - expected) ** 2 / expected)[possible].sum() < 24.3


def never(*args, **options):
    raise AssertionError("no row of this batch uses it")


def test_unused_parameters_cost_nothing(monkeypatch):
    harness = SamplerHarness()
    ends = ReferenceRow(NOTHING, [1, 2], [3], min_tokens=1, ends=[7])  # `min_tokens` is reached
    harness.take({0: ReferenceRow(NOTHING, [1]), 1: ReferenceRow(EVERYTHING, [2]), 2: ends})
    for module, names in (
        (penalties, ("apply_penalties", "count_tokens", "to_device")),
        (edits, ("to_device",)),
        (allowed, ("apply_bitmask", "to_device", "packed_bits")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, never)
    logits = torch.randn(2, VOCAB)
    after, _ = harness.step([0, 2], logits)
    assert torch.equal(after, logits)
    # A slot that another request has taken keeps nothing of the earlier request.
    harness.take({1: ReferenceRow(NOTHING, [1])})
    harness.step([1, 0], logits)


@pytest.mark.parametrize("kernel", ["apply_penalties", "apply_bitmask"])
def test_kernels_get_only_rows_with_the_parameter(monkeypatch, kernel):
    module = penalties if kernel == "apply_penalties" else allowed
    real, seen = getattr(module, kernel), []

    def watch(logits, *rest):
        rows = rest[0] if kernel == "apply_penalties" else rest[1]
        seen.append(rows.tolist())
        real(logits, *rest)

    monkeypatch.setattr(module, kernel, watch)
    harness = SamplerHarness()
    harness.take(
        {slot: ReferenceRow(EVERYTHING if slot in (1, 4) else NOTHING, [1]) for slot in range(5)}
    )
    logits = torch.randn(5, VOCAB)
    harness.step([0, 1, 2, 3, 4], logits)
    harness.step([4, 0], logits[:2])
    harness.step([0, 2], logits[:2])
    assert seen == [[1, 4], [0]]


class NoHostSync(TorchDispatchMode):
    """Raises on operations that would make the host wait for a CUDA device: values and sizes that
    depend on data."""

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.LOOKS, f"{name} reads from the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), name
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_no_host_sync_and_no_operations_per_row():
    """More rows or longer contexts mean larger operations, but not more of them."""

    def operations(rows: int, prompt: int) -> list[int]:
        harness, counts = SamplerHarness(), []
        harness.take({slot: ReferenceRow(EVERYTHING, [1, 2] * prompt) for slot in range(rows)})
        for _ in range(3):
            batch = harness.batch(list(range(rows)))
            logits = torch.randn(rows, VOCAB)
            with NoHostSync() as mode:
                tokens = harness.sampler(logits, batch).tokens
            counts.append(mode.operations)
            harness.states.write_sampled(batch.sample_slots, batch.sample_positions, tokens)
            for slot, token in enumerate(tokens.tolist()):
                harness.rows[slot].outputs.append(token)
        return counts

    few = operations(2, 1)
    assert few[0] > few[1] == few[2] > 10
    assert operations(5, 1) == operations(5, 8) == few
