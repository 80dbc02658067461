"""Caches of 8 bits: what is stored, and attention over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.attention import AttentionMetadata
from swell.kernels.host.cache_format import cache_width
from swell.kernels.reference import quantized_cache
from swell.kernels.triton import attention
from swell.kernels.triton.qkv import prepare
from tests.kernels.load import load_backend
from tests.kernels.test_paged_attention import Case
from tests.kernels.test_qkv import EPS
from tests.kernels.test_qkv import Case as QkvCase
from tests.kernels.test_quantized_cache import (
    QUANTIZED,
    check_attention,
    check_special,
    check_written,
    empty_cache,
)

pytestmark = pytest.mark.slow

OWN = [torch.bfloat16, torch.float16]
ROWS = [(1, 40), (0, 4), (1, 1), (5, 70)]


def caches(kv_heads: int, head_dim: int, own: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields a cache of each type, in the size of a model; none if kernels do not compute `own`."""
    for dtype in QUANTIZED if own in OWN else ():
        yield torch.empty(9, kv_heads, 16, cache_width(head_dim, dtype), dtype=torch.uint8).view(
            dtype
        )


def launches(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Launches attention in shapes of models: decoding with splits, and a prompt."""
    for tokens, rows, heads, kv_heads, head_dim in (
        *((1, 1, 32, 8, 128), (8192, 1, 32, 8, 128), (8192, 9, 8, 4, 256), (64, 64, 28, 4, 128)),
        *((64, 64, 64, 8, 64), (1, 1, 32, 32, 96), (8192, 1, 14, 2, 96)),
    ):
        for cache in caches(kv_heads, head_dim, dtype):
            meta = AttentionMetadata(
                query_start=torch.empty(rows + 1, dtype=torch.int32),
                context_tokens=torch.empty(rows, dtype=torch.int32),
                block_table=torch.empty(rows, 32, dtype=torch.int32),
                slot_mapping=torch.empty(tokens, dtype=torch.int64),
                max_query_tokens=0,
                max_context_tokens=0,
            )
            q = torch.empty(tokens, heads, head_dim, dtype=dtype)
            yield attention.paged_attention(q, cache, cache, meta, scale=0.1)


def write_launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the write in sizes of models."""
    for head_dim in (64, 96, 256):
        for cache in caches(4, head_dim, dtype):
            k = torch.empty(3, 4, head_dim, dtype=dtype)
            yield attention.write_kv(k, k, cache, cache, torch.empty(3, dtype=torch.int64))


def qkv_launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches norms, rotation and cache write in sizes of models."""
    for head_dim, has_norms in ((128, True), (64, False), (96, True), (256, False)):
        for cache in caches(4, head_dim, dtype):
            qkv, weight = (
                torch.empty(3, 24 * head_dim, dtype=dtype),
                torch.empty(head_dim).to(dtype),
            )
            norms, angles = (weight, weight) if has_norms else None, torch.empty(3, head_dim // 2)
            slots = torch.empty(3, dtype=torch.int64)
            yield prepare(qkv, norms, EPS, angles, angles, (cache, cache), slots)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", [torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_tokens"), [(1, 64, 16), (2, 20, 5), (1, 7, 1)]
)
def test_stored_numbers_are_within_the_bound(dtype, own, kv_heads, head_dim, block_tokens):
    check_written(attention, dtype, own, kv_heads, head_dim, block_tokens)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_zeros_and_numbers_that_are_not_finite(dtype):
    check_special(attention, dtype, torch.bfloat16)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", OWN, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"),
    [(6, 2, 80, 8), (2, 1, 7, 1)],
)
def test_definition(dtype, own, heads, kv_heads, head_dim, block_tokens):
    check_attention(attention, Case(ROWS, heads, kv_heads, head_dim, block_tokens, own), dtype)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 17},
        {"window": 60, "softcap": 5.0},
        {"sinks": torch.tensor([-3.0, 0.0, 1.5, 6.0])},
    ],
    ids=str,
)
def test_options(dtype, options):
    check_attention(attention, Case(ROWS, 4, 2, 32, dtype=torch.bfloat16), dtype, **options)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", OWN, ids=str)
@pytest.mark.parametrize("has_norms", [True, False])
def test_norms_and_rotation_write_what_the_reference_writes(dtype, own, has_norms):
    case = QkvCase(5, 4, 2, 64, 48, own, own if has_norms else None)
    blocks, slots = case.caches.shape[1], case.slots
    results = []
    for backend in ("reference", "triton"):
        pair = [empty_cache(blocks, 2, case.block_tokens, 64, dtype) for _ in range(2)]
        q = load_backend(backend, "qkv").prepare(
            case.qkv.clone(), case.norms, EPS, case.cos, case.sin, (pair[0], pair[1]), slots
        )
        results.append((q, *pair))
    for got, wanted in zip(*results, strict=True):
        if got.dtype == own:
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
            continue
        found, expected = (quantized_cache.read(x, torch.arange(blocks)) for x in (got, wanted))
        # A number at the border between two values may be rounded to either of them.
        step = expected.abs().amax(-1, keepdim=True).nan_to_num() / 16
        assert torch.equal(found.isnan(), expected.isnan())
        assert ((found - expected).abs().nan_to_num() <= step).all()
