"""Every column against what the tables say, element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels import columns
from swell.kernels.inputs import Inputs

SLOTS, LENGTH, BLOCK, BLOCKS = 6, 40, 4, 10


def column(name: str):
    module = columns.load(name, "inputs")
    if module is None:
        pytest.skip(f"the column {name} cannot run here")
    return module


@st.composite
def steps(draw):
    """(slot, start, count) of each row."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True))
    counts = [draw(st.integers(0, 12)) for _ in slots]
    return [
        (slot, draw(st.integers(0, LENGTH - n)), n) for slot, n in zip(slots, counts, strict=True)
    ]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=60, deadline=None)
@given(step=steps(), seed=st.integers(0, 99))
def test_inputs_of_a_step(name, step, seed):
    torch.manual_seed(seed)
    ids = torch.randint(1000, (SLOTS, LENGTH + 1), dtype=torch.int32)
    table = torch.randint(1 << 30, (SLOTS, BLOCKS), dtype=torch.int32)
    slots, starts, counts = torch.tensor(step, dtype=torch.int64).reshape(-1, 3).T.contiguous()
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    blocks = -(-max((start + count for _, start, count in step), default=0) // BLOCK)
    room = Inputs.allocate(80, SLOTS, BLOCKS, torch.device("cpu"))
    for tensor in room:
        tensor.fill_(-7)
    out = room.first(int(counts.sum()), len(step), blocks)
    column(name).gather_inputs(slots, starts, query_start, ids, table, BLOCK, out)
    tokens = [(slot, p) for slot, start, n in step for p in range(start, start + n)]
    assert out.input_ids.tolist() == [ids[slot, p] for slot, p in tokens]
    assert out.positions.tolist() == [p for _, p in tokens]
    assert out.query_start.tolist() == query_start.tolist()
    assert out.context_tokens.tolist() == [start + n for _, start, n in step]
    assert torch.equal(out.block_table, table[slots, :blocks])
    wanted = [int(table[slot, p // BLOCK]) * BLOCK + p % BLOCK for slot, p in tokens]
    assert out.slot_mapping.tolist() == wanted
    for tensor, part in zip(room, out, strict=True):  # nothing else is touched
        assert (tensor == -7).sum() >= tensor.numel() - part.numel()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_tokens_are_written_where_they_belong(name):
    ids = torch.zeros(3, 5, dtype=torch.int32)
    pairs = torch.tensor([[2, 4], [0, 0], [1, 3]])
    column(name).write_tokens(ids, pairs[:, 0], pairs[:, 1], torch.tensor([7, 8, 9]))
    assert ids.tolist() == [[8, 0, 0, 0, 0], [0, 0, 0, 9, 0], [0, 0, 0, 0, 7]]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("slot", "start"), [(SLOTS, 0), (0, LENGTH + 1), (10**6, 10**6)])
def test_what_lies_outside_of_the_tables_is_an_error(name, slot, start):
    ids = torch.zeros(SLOTS, LENGTH + 1, dtype=torch.int32)
    table = torch.zeros(SLOTS, BLOCKS, dtype=torch.int32)
    at, position, one = (torch.tensor([x]) for x in (slot, start, 1))
    out = Inputs.allocate(2, 2, BLOCKS, torch.device("cpu")).first(1, 1, BLOCKS)
    query_start = torch.tensor([0, 1])
    with pytest.raises(IndexError):
        column(name).gather_inputs(at, position, query_start, ids, table, BLOCK, out)
    with pytest.raises(IndexError):
        column(name).write_tokens(ids, at, position, one)
    assert not ids.any()
