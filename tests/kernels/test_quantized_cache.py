"""Caches of 8 bits: the stored bound, and attention over what is stored."""

from __future__ import annotations

from copy import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from swell.kernels.host.cache_format import LIMITS, SCALE_BYTES, cache_width, head_dim_of
from swell.kernels.reference import quantized_cache
from tests.kernels.load import load_backend
from tests.kernels.test_paged_attention import MIXED, Case, by_definition, close

pytestmark = pytest.mark.slow

QUANTIZED = [torch.int8, torch.float8_e4m3fn]
SHAPES = [
    (4, 4, 64, 16),
    (8, 2, 32, 16),
    (6, 1, 128, 32),
    (4, 2, 80, 8),
    (3, 3, 20, 5),
    (2, 1, 7, 1),
]


def empty_cache(blocks: int, kv_heads: int, block_tokens: int, head_dim: int, dtype) -> Tensor:
    """Returns a cache whose scales are NaN."""
    shape = blocks, kv_heads, block_tokens, cache_width(head_dim, dtype)
    return torch.full(shape, 255, dtype=torch.uint8).view(dtype)


def stored(cache: Tensor, slots: Tensor) -> Tensor:
    """Returns the vectors at these slots, [N, kv_heads, head_dim] float32."""
    block_tokens = cache.shape[2]
    vectors = quantized_cache.read(cache, slots // block_tokens)
    return vectors[torch.arange(len(slots)), :, slots % block_tokens]


def bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest difference that `swell.kernels.attention` allows for each number."""
    scale = x.abs().amax(-1, keepdim=True) / LIMITS[dtype]
    if dtype == torch.int8:
        return (scale / 2).expand(x.shape)
    return torch.maximum(x.abs() / 16, scale / 1024)


def write(
    backend: ModuleType, k: Tensor, v: Tensor, slots: Tensor, blocks: int, block_tokens: int, dtype
) -> tuple[Tensor, Tensor]:
    shape = blocks, k.shape[1], block_tokens, k.shape[2], dtype
    k_cache, v_cache = empty_cache(*shape), empty_cache(*shape)
    backend.write_kv(k, v, k_cache, v_cache, slots)
    return k_cache, v_cache


def check_written(backend: ModuleType, dtype, own, kv_heads, head_dim, block_tokens) -> None:
    """Writes vectors of very different sizes, and compares them with the bound in float64."""
    torch.manual_seed(0)
    tokens, blocks = 30, 30 // block_tokens + 3
    sizes = torch.logspace(-30, 30, tokens)[:, None, None]
    k, v = (torch.randn(2, tokens, kv_heads, head_dim) * sizes).to(own)
    k[:, :, head_dim // 2] = 0
    slots = torch.randperm(blocks * block_tokens)[:tokens]
    slots[4] = -1  # padding
    caches = write(backend, k, v, slots, blocks, block_tokens, dtype)
    wanted = write(load_backend("reference", "attention"), k, v, slots, blocks, block_tokens, dtype)
    written = slots >= 0
    for new, cache, expected in zip((k, v), caches, wanted, strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
        x = new[written].double()
        difference = (stored(cache, slots[written]).double() - x).abs()
        assert (difference <= bound(x, dtype) * (1 + 1e-5)).all()
        others = torch.ones(blocks * block_tokens, dtype=torch.bool)
        others[slots[written]] = False
        assert stored(cache, others.nonzero()[:, 0]).isnan().all(), "other slots are untouched"


def check_special(backend: ModuleType, dtype, own) -> None:
    """A vector without a usable scale affects no other vector."""
    k = torch.randn(6, 2, 16).to(own)
    k[1] = 0.0
    k[2] = 2.0**-101
    k[3, 0, 5] = float("nan")
    k[4, 1, 7] = float("-inf")
    slots = torch.arange(6)
    cache, _ = write(backend, k, k, slots, 2, 4, dtype)
    found = stored(cache, slots)
    assert not found[1:3].any()
    assert found[3, 0].isnan().all()
    assert not found[4, 1].isfinite().any()
    rest = torch.ones(6, 2, dtype=torch.bool)
    rest[1:3], rest[3, 0], rest[4, 1] = False, False, False
    x = k.double()
    assert ((found - x).abs() <= bound(x, dtype) * (1 + 1e-5))[rest].all()


def quantized_batch(
    case: Case, order: list[int], dtype, backend: ModuleType
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """Returns the rows as one batch; a backend has written the caches."""
    q, plain, _, meta = case.paged(order)
    slots = []
    for i, r in enumerate(order):
        position = torch.arange(case.rows[r][1])
        block = meta.block_table[i, position // case.block_tokens].long()
        slots.append(block * case.block_tokens + position % case.block_tokens)
    k, v = (torch.cat([each[r] for r in order]) for each in (case.k, case.v))
    caches = write(backend, k, v, torch.cat(slots), len(plain), case.block_tokens, dtype)
    return q, *caches, meta


def as_stored(case: Case, dtype) -> Case:
    """Returns the case with the keys and values that a cache of this type holds."""
    held = copy(case)
    for name in ("k", "v"):
        rows = [quantized_cache.quantize(x, dtype) for x in getattr(case, name)]
        setattr(held, name, [values.float() * scales for values, scales in rows])
    return held


def check_attention(backend: ModuleType, case: Case, dtype, **options) -> None:
    """Compares attention with its definition in float64 over what is stored."""
    order = list(range(len(case.rows)))
    batch = quantized_batch(case, order, dtype, backend)
    got = backend.paged_attention(*batch, scale=case.head_dim**-0.5, **options)
    options = {"window": 0, "softcap": 0.0, **options}
    held = as_stored(case, dtype)
    close(got, torch.cat([by_definition(held, r, **options) for r in order]), case.dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_tokens"), [each[1:] for each in SHAPES])
def test_stored_numbers_are_within_the_bound(name, dtype, own, kv_heads, head_dim, block_tokens):
    backend = load_backend(name, "attention")
    check_written(backend, dtype, own, kv_heads, head_dim, block_tokens)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_and_numbers_that_are_not_finite(name, dtype, own):
    check_special(load_backend(name, "attention"), dtype, own)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), SHAPES)
def test_definition(name, dtype, own, heads, kv_heads, head_dim, block_tokens):
    case = Case(MIXED, heads, kv_heads, head_dim, block_tokens, own)
    check_attention(load_backend(name, "attention"), case, dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 17},
        {"window": 60, "softcap": 5.0},
        {"lookahead": WHOLE_ROW, "window": 9},
        {"sinks": torch.tensor([-30.0, 0.0, 1.5, 6.0])},
    ],
    ids=str,
)
def test_options(name, dtype, options):
    check_attention(load_backend(name, "attention"), Case(MIXED, 4, 2, 32), dtype, **options)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
def test_batch_does_not_matter(dtype, own):
    """The batch does not change a bit: a token by itself, in a batch, and in a prompt that is cut
    into other chunks."""
    backend = load_backend("cpu", "attention")
    case = Case([(150, 150), (1, 77), (64, 200)], 8, 2, 64, dtype=own)

    def attend(case: Case, order: list[int]) -> Tensor:
        batch = quantized_batch(case, order, dtype, backend)
        return backend.paged_attention(*batch, scale=0.125)

    alone = [attend(case, [r]) for r in range(3)]
    for order in ([0, 1, 2], [2, 0, 1]):
        assert torch.equal(attend(case, order), torch.cat([alone[r] for r in order]))
    for cut in (1, 13, 149):
        parts = Case([(cut, cut), (150 - cut, 150)], 8, 2, 64, dtype=own)
        parts.q = [case.q[0][:cut], case.q[0][cut:]]
        parts.k, parts.v = [case.k[0][:cut], case.k[0]], [case.v[0][:cut], case.v[0]]
        assert torch.equal(attend(parts, [0, 1]), alone[0])


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 2)], ids=["for all", "for each head"])
def test_scales_that_a_checkpoint_stores_are_never_finer(dtype, dims):
    """A stored scale is the largest magnitude of some text, for all heads or for each, and numbers
    above it are cut off. Scales of vectors have smaller bounds, and smaller errors."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.3, 20.0, 1.0])[None, :, None]
    text, x = torch.randn(2, 400, 3, 64) * sizes
    scale = text.abs().amax(dims, keepdim=True) / LIMITS[dtype]
    within = (x / scale).clamp(-LIMITS[dtype], LIMITS[dtype])
    found = (within.round() if dtype == torch.int8 else within).to(dtype).float() * scale
    values, scales = quantized_cache.quantize(x, dtype)
    own_error, error = (values.float() * scales - x).abs(), (found - x).abs()
    allowed = scale.expand(x.shape) / 2
    if dtype != torch.int8:
        allowed = torch.maximum(x.abs() / 16, scale / 1024)
    is_cut = x.abs() > scale * LIMITS[dtype]
    covered = ~is_cut.any(-1)
    assert is_cut.any() and (bound(x, dtype) <= allowed * (1 + 1e-5))[covered].all()
    assert (own_error <= bound(x, dtype) * (1 + 1e-5)).all()
    assert (own_error.square().sum((0, 2)) < error.square().sum((0, 2))).all()


def test_the_width_of_a_cache():
    for dtype in QUANTIZED:
        assert cache_width(64, dtype) == 64 + SCALE_BYTES
        assert head_dim_of(empty_cache(1, 1, 4, 64, dtype)) == 64
    assert cache_width(64, torch.bfloat16) == head_dim_of(torch.empty(1, 1, 4, 64)) == 64
