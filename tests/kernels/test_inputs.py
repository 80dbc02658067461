"""The gathered inputs: every backend against the contents of the tables, element by element."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.inputs import Inputs
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

SLOTS, LENGTH, BLOCK, BLOCKS = 6, 40, 4, 10


def backend(name: str):
    return load_backend(name, "inputs")


@st.composite
def steps(draw):
    """Returns (slot, start, count, samples) of each row."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True))
    counts = [draw(st.integers(0, 12)) for _ in slots]
    return [
        (slot, draw(st.integers(0, LENGTH - n)), n, draw(st.integers(0, min(n, 5))))
        for slot, n in zip(slots, counts, strict=True)
    ]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=60, deadline=None)
@given(step=steps(), seed=st.integers(0, 99))
def test_inputs_of_a_step_equal_the_reference(name, step, seed):
    torch.manual_seed(seed)
    ids = torch.randint(1000, (SLOTS, LENGTH + 1), dtype=torch.int32)
    table = torch.randint(1 << 30, (SLOTS, BLOCKS), dtype=torch.int32)
    out = Inputs.allocate(80, SLOTS, BLOCKS, torch.device("cpu"), samples=5 * SLOTS)
    for tensor in out:
        tensor.fill_(-7)
    slots, starts, counts, draws = ([row[i] for row in step] for i in range(4))
    gather = backend(name).make_gather(ids, table, BLOCK, out)
    sizes = gather(slots, starts, counts, draws)
    tokens = [(slot, p) for slot, start, n, _ in step for p in range(start, start + n)]
    ends = [start + n for _, start, n, _ in step]
    assert sizes == (
        len(tokens), len(step), sum(draws), max(counts, default=0), max(ends, default=0)
    )  # fmt: skip

    def begins_with(tensor, wanted):  # the rest of the tensor stays unchanged
        assert tensor.tolist() == wanted + [-7] * (len(tensor) - len(wanted))

    begins_with(out.input_ids, [ids[slot, p].item() for slot, p in tokens])
    begins_with(out.positions, [p for _, p in tokens])
    mapping = [table[slot, p // BLOCK].item() * BLOCK + p % BLOCK for slot, p in tokens]
    begins_with(out.slot_mapping, mapping)
    last = list(accumulate(counts))
    begins_with(out.query_start, [0, *last])
    begins_with(out.context_tokens, ends)
    reported = zip(last, slots, ends, draws, strict=True)
    sampling = [
        (end - 1 - back, slot, position - back)
        for end, slot, position, draws in reported
        for back in reversed(range(draws))
    ]
    for column_, wanted in zip(out.samples, zip(*sampling, strict=True), strict=False):
        begins_with(column_, list(wanted))
    for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        blocks = -(-end // BLOCK)
        assert torch.equal(out.block_table[row, :blocks], table[slot, :blocks])
    assert (out.block_table[len(step) :] == -7).all()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_one_step_after_the_other(name):
    ids = torch.arange(20, dtype=torch.int32).view(2, 10)
    table = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    out = Inputs.allocate(8, 3, 2, torch.device("cpu"))
    gather = backend(name).make_gather(ids, table, 4, out)
    assert gather([1, 0], [2, 0], [3, 1], [True, False]) == (4, 2, 1, 3, 5)
    ids[0, 3] = 77
    table[0, 0] = 9
    assert gather([0], [3], [1], [True]) == (1, 1, 1, 1, 4)
    assert out.input_ids[:1].tolist() == [77] and out.slot_mapping[:1].tolist() == [9 * 4 + 3]
    assert out.samples[:, 0].tolist() == [0, 0, 4]


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_tokens_are_written_to_their_positions(name):
    ids = torch.zeros(3, 5, dtype=torch.int32)
    pairs = torch.tensor([[2, 4], [0, 0], [1, 3]])
    backend(name).write_tokens(ids, pairs[:, 0], pairs[:, 1], torch.tensor([7, 8, 9]))
    assert ids.tolist() == [[8, 0, 0, 0, 0], [0, 0, 0, 9, 0], [0, 0, 0, 0, 7]]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("slot", "start"), [(SLOTS, 0), (0, LENGTH + 1), (10**6, 10**6)])
def test_indices_outside_the_tables_are_an_error(name, slot, start):
    ids = torch.zeros(SLOTS, LENGTH + 1, dtype=torch.int32)
    table = torch.zeros(SLOTS, BLOCKS, dtype=torch.int32)
    out = Inputs.allocate(2, 2, BLOCKS, torch.device("cpu"))
    gather = backend(name).make_gather(ids, table, BLOCK, out)
    with pytest.raises(IndexError, match=f"row 0 of the step: slot {slot} from position {start}"):
        gather([slot], [start], [1], [True])
    at, position, one = (torch.tensor([x]) for x in (slot, start, 1))
    with pytest.raises(IndexError):
        backend(name).write_tokens(ids, at, position, one)
    assert not ids.any()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_sampled_token_is_written_to_its_position(name):
    ids = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    table = torch.zeros(SLOTS, BLOCKS, dtype=torch.int32)
    out = Inputs.allocate(4, 2, BLOCKS, torch.device("cpu"))
    gather = backend(name).make_gather(ids, table, BLOCK, out)
    assert gather([1, 0], [LENGTH - 1, LENGTH - 2], [1, 1], [False, True]).samples == 1
    with pytest.raises(IndexError, match=f"row 1 of the step: slot 0 from position {LENGTH - 1}"):
        gather([1, 0], [0, LENGTH - 1], [1, 1], [True, True])


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_samples_have_room_and_tokens_of_their_row(name):
    ids = torch.zeros(SLOTS, LENGTH + 1, dtype=torch.int32)
    table = torch.zeros(SLOTS, BLOCKS, dtype=torch.int32)
    out = Inputs.allocate(9, 2, BLOCKS, torch.device("cpu"), samples=3)
    gather = backend(name).make_gather(ids, table, BLOCK, out)
    assert gather([0, 1], [0, 0], [3, 3], [2, 1]).samples == 3
    assert out.samples.tolist() == [[1, 2, 5], [0, 0, 1], [2, 3, 3]]
    with pytest.raises(ValueError, match="4 samples, but there is room for 3"):
        gather([0, 1], [0, 0], [3, 3], [2, 2])
    with pytest.raises(IndexError, match="row 0 of the step"):
        gather([0], [0], [2], [3])


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("rows", "count", "what"), [(1, 3, "3 tokens"), (3, 0, "3 rows")])
def test_a_step_that_does_not_fit_is_an_error(name, rows, count, what):
    ids = torch.zeros(SLOTS, LENGTH + 1, dtype=torch.int32)
    table = torch.zeros(SLOTS, BLOCKS, dtype=torch.int32)
    out = Inputs.allocate(2, 2, BLOCKS, torch.device("cpu"))
    gather = backend(name).make_gather(ids, table, BLOCK, out)
    with pytest.raises(ValueError, match=f"{what}, but there is room for 2"):
        gather(list(range(rows)), [0] * rows, [count] * rows, [True] * rows)
