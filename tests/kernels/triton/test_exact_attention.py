"""Exact attention: close to the definition, and a token has the same bits in every batch and for
every division of its row into steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from swell.kernels.triton.attention import exact, launch, paged_attention
from tests.kernels.test_paged_attention import Case, by_definition, close
from tests.kernels.triton.interpreter import record_variants
from tests.kernels.triton.test_attention import _buffers_are_nan

__all__ = ["_buffers_are_nan"]

pytestmark = pytest.mark.slow

LONG = (11, 280)
"""Query tokens and context of the row whose bits are compared: 16 parts of the first size, and one
of the next one. Its queries need two tiles."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch) -> None:
    """One tile of float32 in each of the first parts, so that short rows have parts of two
    sizes."""
    monkeypatch.setattr(exact, "PART_TOKENS", 16)


@pytest.fixture(params=[0, 1 << 20], ids=["one program", "a program for each part"])
def _programs(request, monkeypatch) -> None:
    """Lets one program compute all parts of a token, or one program each of them."""
    monkeypatch.setattr(launch, "PROGRAMS", request.param)


def steps_of(case: Case, steps: list[tuple[int, int, int]], **options) -> list[Tensor]:
    """Computes steps of rows in one batch. A step is (row, first, end): of the row's query tokens,
    which are its last ones. Returns the results of each step."""
    _, k_cache, v_cache, meta = case.paged(list(range(len(case.rows))))
    starts = torch.tensor([0, *(end - first for _, first, end in steps)]).cumsum(0)
    contexts = [case.rows[r][1] - case.rows[r][0] + end for r, _, end in steps]
    q = torch.cat([case.q[r][first:end] for r, first, end in steps])
    own = AttentionMetadata(
        query_start=starts.int(),
        context_tokens=torch.tensor(contexts).int(),
        block_table=meta.block_table[[r for r, _, _ in steps]],
        slot_mapping=meta.slot_mapping,
        max_query_tokens=max(end - first for _, first, end in steps),
        max_context_tokens=max(contexts),
        exact=True,
    )
    out = paged_attention(q, k_cache, v_cache, own, scale=case.head_dim**-0.5, **options)
    return list(out.split([end - first for _, first, end in steps]))


def whole(case: Case, **options) -> list[Tensor]:
    """Computes all query tokens of all rows in one batch."""
    return steps_of(case, [(r, 0, n) for r, (n, _) in enumerate(case.rows) if n], **options)


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 60, "softcap": 5.0},
        {"lookahead": WHOLE_ROW},
        {"sinks": torch.tensor([-30.0, 0.0, 1.5, 6.0])},
        {"sinks": torch.tensor([-30.0, 0.0, 1.5, 6.0]), "window": 9},
    ],
    ids=str,
)
def test_definition(options, dtype, monkeypatch):
    if dtype != torch.float32:
        monkeypatch.setattr(exact, "PART_TOKENS", 64)  # the size of a tile
    case = Case([(1, 100), (5, 40), (1, 1)], 4, 2, 32, dtype=dtype)
    full = {"window": 0, "softcap": 0.0, **options}
    for r, got in enumerate(whole(case, **options)):
        close(got, by_definition(case, r, **full), dtype)


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("context", [15, 16, 17, 256, 257, 320, 321])
def test_borders_of_parts(context):
    """The table has exactly the blocks of the row, so that no part is computed that it lacks."""
    case = Case([(1, context)], 1, 1, 16)
    q, k_cache, v_cache, meta = case.paged([0])
    meta = meta._replace(block_table=meta.block_table[:, :-1], exact=True)
    got = paged_attention(q, k_cache, v_cache, meta, scale=0.25)
    close(got, by_definition(case, 0, 0, 0.0), torch.float32)


@pytest.mark.parametrize("units", [1, 3, 16, 17, 79, 80, 81, 336, 1359, 1360, 5000])
def test_the_number_of_parts(units):
    """16 parts of 1, 4, 16 and 64 units; the last one has all further positions."""
    ends = torch.tensor([size for size in (1, 4, 16, 64) for _ in range(16)]).cumsum(0)
    fewer, most = int((ends < units).sum()), exact.MAX_PARTS.value
    for positions in (units * 16 - 15, units * 16):
        assert exact._count_parts(positions) == min(most, fewer + 1)


@pytest.mark.parametrize(
    "options", [{}, {"window": 33, "sinks": torch.tensor([0.5, 2.0])}], ids=["plain", "all options"]
)
def test_a_token_has_the_same_bits_in_every_batch(options, monkeypatch):
    """A prompt in one step, in chunks, and token by token; between rows that move its tokens to
    other places of their tiles; with a program for each part and with one for all."""
    variants = record_variants(monkeypatch)
    case = Case([LONG, (3, 20), (1, 30), (1, 5)], 2, 1, 16)
    queries = LONG[0]
    monkeypatch.setattr(launch, "PROGRAMS", 0)
    (wanted,) = steps_of(case, [(0, 0, queries)], **options)
    close(wanted, by_definition(case, 0, **{"window": 0, "softcap": 0.0, **options}), torch.float32)

    def check(*steps: tuple[int, int], others: tuple[tuple[int, int, int], ...] = ()) -> None:
        for first, end in steps:
            found = steps_of(case, [*others, (0, first, end), *others], **options)[len(others)]
            assert torch.equal(found, wanted[first:end]), (first, end)

    check((0, 1), (1, 4), (4, queries))
    check((2, 9), others=((1, 0, 3), (2, 0, 1), (3, 0, 1)))
    monkeypatch.setattr(launch, "PROGRAMS", 1 << 20)
    check((0, queries), (10, queries))
    check((5, 6), others=((1, 0, 3), (3, 0, 1)))
    assert sorted(name for name, *_ in variants) == ["_add_parts", "_attend_parts"], variants


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_types_have_the_same_bits_in_every_batch(dtype, monkeypatch):
    """With the largest group that shares a tile with other query tokens, and an odd head size."""
    monkeypatch.setattr(exact, "PART_TOKENS", 64)
    variants = record_variants(monkeypatch)
    case = Case([(9, 140), (1, 70)], 3, 1, 40, dtype=dtype)
    monkeypatch.setattr(launch, "PROGRAMS", 0)
    (wanted,) = steps_of(case, [(0, 0, 9)])
    for programs, tokens in ((0, (0, 5)), (1 << 20, (3, 8))):
        monkeypatch.setattr(launch, "PROGRAMS", programs)
        for at in tokens:
            decoded = steps_of(case, [(1, 0, 1), (0, at, at + 1)])[1]
            assert torch.equal(decoded[0], wanted[at]), at
    assert sorted(name for name, *_ in variants) == ["_add_parts", "_attend_parts"], variants


def test_padding_may_be_anything(monkeypatch):
    """Tokens after the last row are padding, and so are rows without context."""
    monkeypatch.setattr(launch, "PROGRAMS", 1 << 20)
    case = Case([(2, 100), (1, 40)], 2, 1, 16)
    (one, other) = whole(case)
    q, k_cache, v_cache, meta = case.paged([0, 1])
    padded = meta._replace(
        query_start=torch.cat([meta.query_start, torch.tensor([3, 3]).int()]),
        context_tokens=torch.cat([meta.context_tokens, torch.tensor([0, 0]).int()]),
        block_table=torch.cat([meta.block_table, meta.block_table]),
        exact=True,
    )
    noise = torch.full((5, 2, 16), math.nan)
    got = paged_attention(torch.cat([q, noise]), k_cache, v_cache, padded, scale=0.25)
    assert torch.equal(got[:3], torch.cat([one, other]))


def launches(dtype: torch.dtype) -> Iterator[Tensor]:
    """Launches the kernels in shapes of models: a few rows, whose parts are computed by programs of
    their own, and a long prompt."""
    for tokens, rows, heads, kv_heads, head_dim, options in (
        (1, 1, 32, 8, 128, {}),
        (8192, 9, 8, 4, 256, {"window": 4096, "softcap": 50.0}),
        (8192, 1, 64, 8, 64, {"sinks": torch.empty(64)}),
        (64, 64, 28, 4, 96, {}),
    ):
        cache = torch.empty(9, kv_heads, 16, head_dim, dtype=dtype)
        meta = AttentionMetadata(
            query_start=torch.empty(rows + 1, dtype=torch.int32),
            context_tokens=torch.empty(rows, dtype=torch.int32),
            block_table=torch.empty(rows, 2048, dtype=torch.int32),
            slot_mapping=torch.empty(tokens, dtype=torch.int64),
            max_query_tokens=0,
            max_context_tokens=0,
            exact=True,
        )
        q = torch.empty(tokens, heads, head_dim, dtype=dtype)
        yield paged_attention(q, cache, cache, meta, scale=0.1, **options)
