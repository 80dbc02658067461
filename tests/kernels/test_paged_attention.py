"""Every backend computes the definition of attention, for any batch around a token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """Random K and V of each row, stored in a shuffled paged cache whose free slots are NaN."""

    rows: list[tuple[int, int]]  # (query tokens, context tokens)
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        shape = (self.kv_heads, self.head_dim)
        self.q = [torch.randn(n, self.heads, self.head_dim).to(self.dtype) for n, _ in self.rows]
        self.k = [torch.randn(c, *shape).to(self.dtype) for _, c in self.rows]
        self.v = [torch.randn(c, *shape).to(self.dtype) for _, c in self.rows]

    def paged(self, order: list[int]) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Returns the rows `order` as one batch."""
        counts = [-(-self.rows[r][1] // self.block_tokens) for r in order]
        free = torch.randperm(sum(counts) + 3).int()
        shape = (len(free), self.kv_heads, self.block_tokens, self.head_dim)
        k_cache, v_cache = torch.full((2, *shape), float("nan")).to(self.dtype)
        table = torch.full((len(order), max(counts) + 1), len(free) - 1, dtype=torch.int32)
        taken = 0
        for i, r in enumerate(order):
            table[i, : counts[i]] = free[taken : taken + counts[i]]
            taken += counts[i]
            position = torch.arange(self.rows[r][1])
            block, offset = table[i, position // self.block_tokens], position % self.block_tokens
            k_cache[block, :, offset] = self.k[r]
            v_cache[block, :, offset] = self.v[r]
        starts = torch.tensor([0] + [self.rows[r][0] for r in order]).cumsum(0)
        meta = AttentionMetadata(
            query_start=starts.int(),
            context_tokens=torch.tensor([self.rows[r][1] for r in order]).int(),
            block_table=table,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_tokens=max(self.rows[r][0] for r in order),
            max_context_tokens=max(self.rows[r][1] for r in order),
        )
        return torch.cat([self.q[r] for r in order]), k_cache, v_cache, meta


def backend(name: str):
    return load_backend(name, "attention").paged_attention


def by_definition(
    case: Case,
    row: int,
    window: int,
    softcap: float,
    lookahead: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes one row in float64, one query token at a time over exactly the positions that it
    attends to."""
    n, c = case.rows[row]
    head = torch.arange(case.heads) // (case.heads // case.kv_heads)
    q, k, v = case.q[row].double(), case.k[row].double()[:, head], case.v[row].double()[:, head]
    out = torch.empty(n, case.heads, case.head_dim, dtype=torch.float64)
    for i in range(n):
        position = c - n + i
        seen = slice(max(0, position - window + 1) if window else 0, position + 1 + lookahead)
        scores = torch.einsum("hd,jhd->hj", q[i], k[seen]) * case.head_dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        terms = scores.exp()
        total = terms.sum(1) if sinks is None else terms.sum(1) + sinks.double().exp()
        out[i] = torch.einsum("hj,jhd->hd", terms / total[:, None], v[seen])
    return out


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-2, atol=TOLERANCE[dtype])


MIXED = [(1, 40), (1, 1), (7, 7), (5, 90), (33, 130)]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"),
    [(4, 4, 64, 16), (8, 2, 32, 16), (6, 1, 128, 32), (4, 2, 80, 8), (3, 3, 20, 5), (2, 1, 7, 1)],
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (17, 0.0), (1, 0.0), (60, 5.0)])
def test_definition(name, dtype, heads, kv_heads, head_dim, block_tokens, window, softcap):
    case = Case(MIXED, heads, kv_heads, head_dim, block_tokens, dtype)
    if dtype == torch.float16 and head_dim != 64:
        pytest.skip("one shape is enough for a type that the cpu backend leaves to the reference")
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    got = backend(name)(*case.paged(list(range(len(MIXED)))), **options)
    wanted = torch.cat([by_definition(case, r, window, softcap) for r in range(len(MIXED))])
    close(got, wanted, dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("lookahead", [1, 8, 70, WHOLE_ROW])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_lookahead(name, dtype, window, lookahead, head_dim):
    case = Case(MIXED, 4, 2, head_dim, dtype=dtype)
    options = {"scale": head_dim**-0.5, "window": window, "lookahead": lookahead}
    got = backend(name)(*case.paged(list(range(len(MIXED)))), **options)
    rows = [by_definition(case, r, window, 0.0, lookahead) for r in range(len(MIXED))]
    close(got, torch.cat(rows), dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks(name, window):
    case, sinks = Case(MIXED, 4, 2, 32), torch.tensor([-30.0, 0.0, 1.5, 6.0])
    batch = case.paged(list(range(len(MIXED))))
    got = backend(name)(*batch, scale=32**-0.5, window=window, sinks=sinks)
    rows = [by_definition(case, r, window, 0.0, sinks=sinks) for r in range(len(MIXED))]
    close(got, torch.cat(rows), torch.float32)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_torch_sdpa(name):
    """Attention equals torch's own on contiguous K and V."""
    case = Case([(50, 50)], 8, 2, 64)
    got = backend(name)(*case.paged([0]), scale=0.125)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        case.q[0].transpose(0, 1)[None],
        case.k[0].transpose(0, 1)[None],
        case.v[0].transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    close(got, wanted[0].transpose(0, 1), torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=6),
    shape=st.sampled_from([(4, 4, 32), (8, 2, 64), (2, 1, 24)]),
    block_tokens=st.sampled_from([1, 4, 16, 48]),
    window=st.sampled_from([0, 1, 30]),
    seed=st.integers(0, 1000),
)
def test_backends_agree(contexts, shape, block_tokens, window, seed):
    """The compiled backend agrees with the reference on any batch of rows."""
    rows = [(min(a, b), max(a, b)) for a, b in contexts]
    case = Case(rows, *shape, block_tokens, seed=seed)
    batch = case.paged(list(range(len(rows))))
    wanted = backend("reference")(*batch, scale=0.2, window=window)
    close(backend("cpu")(*batch, scale=0.2, window=window), wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("lookahead", [0, WHOLE_ROW])
def test_batch_does_not_matter(dtype, window, lookahead):
    """The batch does not change a bit: a token by itself, in a batch, and in a prompt that is cut
    into other chunks."""
    attend = backend("cpu")
    case = Case([(150, 150), (1, 77), (64, 200)], 8, 2, 64, dtype=dtype)
    options = {"scale": 0.125, "window": window, "lookahead": lookahead}
    alone = [attend(*case.paged([r]), **options) for r in range(3)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        got = attend(*case.paged(order), **options)
        assert torch.equal(got, torch.cat([alone[r] for r in order]))
    for cut in (1, 13, 149) if not lookahead else ():
        parts = Case([(cut, cut), (150 - cut, 150)], 8, 2, 64, dtype=dtype)
        parts.q = [case.q[0][:cut], case.q[0][cut:]]
        parts.k, parts.v = [case.k[0][:cut], case.k[0]], [case.v[0][:cut], case.v[0]]
        assert torch.equal(attend(*parts.paged([0, 1]), **options), alone[0])


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_strided_queries(name):
    """Queries may be a slice of a wider projection."""
    case = Case([(3, 30), (1, 5)], 4, 2, 32)
    q, *rest = case.paged([0, 1])
    wide = torch.randn(4, 8 * 32)
    wide[:, : 4 * 32] = q.flatten(1)
    got = backend(name)(wide[:, : 4 * 32].unflatten(1, (4, 32)), *rest, scale=0.2)
    assert torch.equal(got, backend(name)(q, *rest, scale=0.2))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_rows_without_tokens(name):
    case = Case([(2, 9), (0, 4), (1, 30)], 2, 2, 16)
    got = backend(name)(*case.paged([0, 1, 2]), scale=0.25)
    assert torch.equal(got, backend(name)(*case.paged([0, 2]), scale=0.25))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("elements", [1, 5 * 4 * 130, 2 * 4 * 33 * 130])
def test_the_reference_in_chunks_of_rows_and_of_queries(monkeypatch, elements, window):
    reference = load_backend("reference", "attention")
    case = Case(MIXED, 4, 2, 32)
    batch = case.paged(list(range(len(MIXED))))
    whole = reference.paged_attention(*batch, scale=0.2, window=window)
    monkeypatch.setattr(reference, "MAX_ELEMENTS", elements)
    cut = reference.paged_attention(*batch, scale=0.2, window=window)
    close(cut, whole, torch.float32)
