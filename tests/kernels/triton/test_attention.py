"""Paged attention against its definition."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from swell.kernels.triton.attention import launch, paged_attention, splits
from tests.kernels.test_paged_attention import Case, by_definition, close

pytestmark = pytest.mark.slow

ROWS = [(1, 40), (0, 4), (1, 1), (5, 70)]
"""Decoding, a row without tokens, a first token, and a chunk of a prompt after its beginning."""


def launches(dtype: torch.dtype) -> Iterator[Tensor]:
    """Launches the kernels in shapes of models: decoding with splits, a prompt, all options, and
    heads whose size is not a power of two."""
    plain, full = {"scale": 0.1}, {"scale": 0.1, "window": 4096, "softcap": 50.0}
    both_ways = {"scale": 0.1, "lookahead": WHOLE_ROW}
    for tokens, rows, heads, kv_heads, head_dim, options in (
        *((1, 1, 32, 8, 128, plain), (8192, 1, 32, 8, 128, plain), (8192, 9, 8, 4, 256, full)),
        (64, 64, 64, 8, 64, {"scale": 0.1, "sinks": torch.empty(64)}),
        (64, 64, 28, 4, 128, plain),
        *((1, 1, 32, 32, 96, plain), (8192, 1, 14, 2, 96, both_ways)),
        *((8192, 1, 14, 2, 64, plain), (64, 64, 14, 2, 64, full)),
    ):
        cache = torch.empty(9, kv_heads, 16, head_dim, dtype=dtype)
        meta = AttentionMetadata(
            query_start=torch.empty(rows + 1, dtype=torch.int32),
            context_tokens=torch.empty(rows, dtype=torch.int32),
            block_table=torch.empty(rows, 32, dtype=torch.int32),
            slot_mapping=torch.empty(tokens, dtype=torch.int64),
            max_query_tokens=0,
            max_context_tokens=0,
        )
        q = torch.empty(tokens, heads, head_dim, dtype=dtype)
        yield paged_attention(q, cache, cache, meta, **options)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch) -> None:
    """Limits the programs, which the interpreter runs one after the other."""
    monkeypatch.setattr(launch, "PROGRAMS", 24)


@pytest.fixture(params=[1, 4], ids=["one split", "four splits"])
def _splits(request, monkeypatch) -> None:
    """Lets a test compute with one split, and with more than there are tiles for most rows."""
    monkeypatch.setattr(launch, "PROGRAMS", 4096)
    monkeypatch.setattr(splits, "MAX_SPLITS", request.param)


@pytest.fixture(autouse=True)
def _buffers_are_nan(monkeypatch) -> None:
    """Fills the buffers for splits with NaN, which must not reach a result. After each there is
    memory, so that a write after its end fails a test and not the process."""

    def filled(self: Tensor, *shape: int, **options: object) -> Tensor:
        size = math.prod(shape)
        empty = self.new_zeros(size + 4096, **options)[:size].view(shape)
        return empty.fill_(float("nan")) if empty.is_floating_point() else empty

    monkeypatch.setattr(Tensor, "new_empty", filled)


def check(case: Case, **options) -> None:
    """Compares a batch of all rows of a case with the definition."""
    order = list(range(len(case.rows)))
    got = paged_attention(*case.paged(order), scale=case.head_dim**-0.5, **options)
    options = {"window": 0, "softcap": 0.0, **options}
    close(got, torch.cat([by_definition(case, r, **options) for r in order]), case.dtype)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        *((4, 4, 64, torch.float32), (6, 2, 80, torch.bfloat16), (5, 1, 128, torch.float16)),
        *((5, 1, 128, torch.bfloat16), (6, 2, 80, torch.float32)),
    ],
)
def test_definition(heads, kv_heads, head_dim, dtype):
    check(Case(ROWS, heads, kv_heads, head_dim, dtype=dtype))


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 17},
        {"window": 60, "softcap": 5.0},
        {"lookahead": 1},
        {"lookahead": WHOLE_ROW, "window": 9},
        {"lookahead": 8, "window": 3},
        {"sinks": torch.tensor([-30.0, 0.0, 1.5, 6.0])},
    ],
    ids=str,
)
def test_options(options):
    check(Case(ROWS, 4, 2, 32), **options)


@pytest.mark.parametrize(
    ("context", "block_tokens"),
    [(15, 16), (16, 1), (17, 16), (32, 16), (33, 48), (64, 16), (65, 1)],
)
def test_borders_of_tiles_and_blocks(context, block_tokens):
    check(Case([(2, context)], 2, 1, 16, block_tokens))


@pytest.mark.usefixtures("_splits")
def test_prompts_and_borders_of_query_blocks():
    check(Case([(33, 33), (16, 47), (17, 17)], 3, 1, 64, dtype=torch.bfloat16))


def test_large_groups_and_heads():
    check(Case([(2, 40), (1, 7)], 20, 1, 64))
    check(Case([(2, 40), (1, 7)], 2, 1, 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_group_of_seven_with_heads_of_96(dtype):
    """In each tile two lines do not belong to a query."""
    check(Case([(5, 70), (1, 33)], 14, 2, 96, dtype=dtype))


def test_heads_that_are_too_large_are_left_to_the_reference():
    check(Case([(2, 20)], 2, 1, 288))


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("context", [0, 4])
@pytest.mark.parametrize("added", [0, 3])
def test_rows_without_tokens_write_nothing(monkeypatch, exact, context, added):
    """Neither to other tokens nor after the last one: the rows that fill a bucket begin there."""
    case = Case([(2, 40), (1, 7)], 4, 2, 32)
    q, k_cache, v_cache, meta = case.paged([0, 1])
    meta = meta._replace(exact=exact)
    expected = paged_attention(q, k_cache, v_cache, meta, scale=0.2)
    padded = meta._replace(
        query_start=torch.cat([meta.query_start, torch.tensor([3, 3]).int()]),
        context_tokens=torch.cat([meta.context_tokens, torch.tensor([context] * 2).int()]),
        block_table=torch.cat([meta.block_table, meta.block_table]),
    )
    q = torch.cat([q, torch.full((added, *q.shape[1:]), float("nan"))])
    memory = torch.full((len(q) + 1, *q.shape[1:]), 7.0)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: memory[: shape[0]])
    found = paged_attention(q, k_cache, v_cache, padded, scale=0.2)
    close(found[:3], expected, torch.float32)
    assert found.data_ptr() == memory.data_ptr()
    assert (memory[len(q) :] == 7.0).all(), "memory after the result is written"


def test_strided_queries():
    """Queries may be a slice of a wider projection."""
    case = Case([(3, 30), (1, 5)], 4, 2, 32)
    q, *rest = case.paged([0, 1])
    wide = torch.randn(4, 8 * 32)
    wide[:, : 4 * 32] = q.flatten(1)
    got = paged_attention(wide[:, : 4 * 32].unflatten(1, (4, 32)), *rest, scale=0.2)
    assert torch.equal(got, paged_attention(q, *rest, scale=0.2))


def one_row(context: int, block_table: Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=torch.tensor([0, 1]).int(),
        context_tokens=torch.tensor([context]).int(),
        block_table=block_table[None],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_tokens=1,
        max_context_tokens=context,
    )


def test_a_window_at_the_end_of_100_000_tokens():
    """All entries of the block table are the same block, so that K and V repeat. Tiles before the
    window are not computed: the interpreter would take a minute."""
    context, window, block_tokens = 100_007, 500, 16
    q, cache = torch.randn(1, 2, 16), torch.randn(2, 2, 1, block_tokens, 16)
    table = torch.ones(-(-context // block_tokens), dtype=torch.int32)
    got = paged_attention(q, cache[0], cache[1], one_row(context, table), scale=0.25, window=window)
    seen = torch.arange(context - window, context) % block_tokens
    k, v = cache[:, 1, 0, seen].double()
    close(got[0], torch.softmax(q[0].double() @ k.T * 0.25, 1) @ v, torch.float32)


def test_blocks_may_lie_beyond_2_to_the_31_elements():
    """Only the pages that are read take memory."""
    block = 1 << 20
    cache = torch.empty((1 << 31) // block + 2, 1, block // 16, 16, dtype=torch.float16)
    cache[-1, 0, :3] = torch.randn(3, 16)
    meta = one_row(3, torch.tensor([len(cache) - 1]).int())
    q = torch.randn(1, 1, 16).half()
    got = paged_attention(q, cache, cache, meta, scale=0.25)
    last = cache[-1, 0, :3].double()
    close(got[0], torch.softmax(q[0].double() @ last.T * 0.25, 1) @ last, torch.float16)
