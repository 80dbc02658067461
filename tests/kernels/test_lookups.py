"""Captured and rounded lookups read no memory outside their table: an id outside it is an
error or counts from the end, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from swell.kernels import linear
from swell.kernels.graph import NotCapturableError, capture, rounding_like_replays
from swell.kernels.weights.quantized import QuantizedTensor
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

IDS, OTHERS = 6, 4
"""The numbers of rows of a capture."""
TABLE = torch.arange(1.0, 9.0)[:, None] * torch.ones(32)
SIZE = len(TABLE)
ID = st.integers(-SIZE - 2, SIZE + 1) | st.sampled_from([2**40, -(2**40), 2**62, -(2**62)])

OUTSIDE = r"index -?\d+ is out of range: the table has 8 rows"

Work = Callable[[Tensor, Tensor], Tensor]
TORCH: dict[str, Work] = {
    "embedding": lambda ids, table: functional.embedding(ids, table),
    "index_select": lambda ids, table: table.index_select(0, ids),
    "index_select, dim -2": lambda ids, table: table.index_select(-2, ids),
    "index": lambda ids, table: table[ids],
    "index of a row of ids": lambda ids, table: table[ids[None]][0],
    "index of int32": lambda ids, table: table[ids.clamp(-(2**31), 2**31 - 1).int()],
    "index of columns": lambda ids, table: table[:, ids].T,
    "index of both": lambda ids, table: table[ids, ids % 4],
    "index of ids that are computed": lambda ids, table: table[ids + 1],
    "index of one table by another": lambda ids, table: table[torch.arange(SIZE)[ids]],
    "gather": lambda ids, table: table.gather(0, ids[:, None].expand(-1, 4)),
    "take": lambda ids, table: table.take(ids),
    "take_along_dim": lambda ids, table: table.take_along_dim(ids[:, None], 0),
    "index_put": lambda ids, table: (table * 1).index_put_((ids,), table[:1]),
    "index_add": lambda ids, table: (table * 1).index_add_(0, ids, ids[:, None] * table[:1]),
    "index_copy": lambda ids, table: (table * 1).index_copy_(0, ids, ids[:, None] * table[:1]),
    "index_fill": lambda ids, table: (table * 1).index_fill_(0, ids, 0.0),
    "scatter": lambda ids, table: (table * 1).scatter_(0, ids[:, None], table[: len(ids), :1]),
    "one_hot": lambda ids, table: functional.one_hot(ids, SIZE),
    "a slice": lambda ids, table: table[ids[0] :],
    "a row": lambda ids, table: table[ids[0]],
    "repeated": lambda ids, table: table[:1].repeat_interleave(ids[:1], 0),
}


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    load_backend("cpu", "graph")


def outcome(work: Callable[[], Tensor]) -> Tensor | None:
    """Returns the result; None: torch raised an error."""
    try:
        return work()
    except (IndexError, RuntimeError):
        return None


def agree(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("work", TORCH.values(), ids=TORCH.keys())
@settings(max_examples=60, deadline=None)
@given(values=st.lists(ID, min_size=1, max_size=IDS))
def test_an_id_has_the_effect_that_it_has_in_torch(work: Work, values: list[int]) -> None:
    """Without a recording, in a recording of the same ids, and in one that replays others."""
    ids, rows = torch.zeros(IDS, dtype=torch.int64), len(values)
    with torch.inference_mode():
        try:
            (result,), graph = capture(lambda: [work(ids, TABLE)], "cpu", IDS, OTHERS)
        except NotCapturableError:
            graph = None
        ids[:rows] = torch.tensor(values)
        expected = outcome(lambda: work(ids[:rows], TABLE))

        def replayed() -> Tensor:
            graph.replay(rows, 1)
            return result[:rows]

        if graph is not None:
            assert agree(outcome(replayed), expected)
            ids[:rows] = 0
            assert agree(outcome(replayed), work(ids[:rows], TABLE)), "the replay after an error"
            ids[:rows] = torch.tensor(values)
        with rounding_like_replays("cpu"):
            assert agree(outcome(lambda: work(ids[:rows], TABLE)), expected)


PACKED: dict[str, Callable[[Tensor], linear.Weight]] = {
    "float32": lambda table: table,
    "packed": linear.pack,
    "packed bfloat16": lambda table: linear.pack(table.bfloat16()),
    "quantized": lambda table: linear.pack_quantized(
        QuantizedTensor(
            torch.full((SIZE, 32), 129, dtype=torch.uint8), table[:, :1].contiguous(), None, 8
        ),
        torch.float32,
    ),
}


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
@settings(max_examples=40, deadline=None)
@given(values=st.lists(ID, min_size=1, max_size=IDS))
def test_ids_outside_any_table_raise_errors(pack, values: list[int]) -> None:
    table, ids = pack(TABLE), torch.zeros(IDS, dtype=torch.int64)
    (result,), graph = capture(lambda: [linear.embedding(ids, table)], "cpu", IDS, OTHERS)
    ids[: len(values)] = torch.tensor(values)
    if all(0 <= value < SIZE for value in values):
        graph.replay(len(values), 1)
        assert torch.equal(result[: len(values)], linear.embedding(ids[: len(values)], table))
        return
    with pytest.raises(IndexError, match=OUTSIDE):
        graph.replay(len(values), 1)
    with pytest.raises(IndexError, match=OUTSIDE):
        linear.embedding(ids[: len(values)], table)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(ID, min_size=1, max_size=OTHERS), rows=st.integers(1, IDS))
def test_rows_that_a_step_lacks_cannot_be_selected(values: list[int], rows: int) -> None:
    """The table is computed in the step, whose number of rows differs from the capture's."""
    ids, which = torch.arange(IDS), torch.zeros(OTHERS, dtype=torch.int64)

    def work(rows: int, others: int) -> list[Tensor]:
        return [linear.embedding(ids[:rows], TABLE)[which[:others]]]

    with torch.inference_mode():
        (result,), graph = capture(lambda: work(IDS, OTHERS), "cpu", IDS, OTHERS)
        which[: len(values)] = torch.tensor(values)
        expected = outcome(lambda: TABLE[ids[:rows]][which[: len(values)]])

        def replayed() -> Tensor:
            graph.replay(rows, len(values))
            return result[: len(values)]

        assert agree(outcome(replayed), expected)
