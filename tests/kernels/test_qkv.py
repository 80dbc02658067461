"""Queries, keys and values between projection and attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


@dataclass
class Case:
    """Random inputs, and caches that are larger than the step needs."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    norms_type: torch.dtype | None
    """The type of the norms' weights; None: no norms."""
    block_tokens: int = 4

    def __post_init__(self) -> None:
        blocks, size = self.tokens + 2, self.heads + 2 * self.kv_heads
        # A part of a wider tensor.
        wide = torch.randn(self.tokens, size * self.head_dim + 3).to(self.dtype)
        self.qkv = wide[:, : size * self.head_dim]
        angles = torch.rand(self.tokens, self.rotary_dim // 2) * 100
        self.cos, self.sin = angles.cos(), angles.sin()
        q_weight, k_weight = torch.randn(2, self.head_dim).to(self.norms_type or self.dtype)
        self.norms = (q_weight, k_weight) if self.norms_type else None
        shape = (2, blocks, self.kv_heads, self.block_tokens, self.head_dim)
        self.caches = torch.randn(shape).to(self.dtype)
        self.slots = torch.randperm(blocks * self.block_tokens)[: self.tokens]
        self.slots[1:2] = -1  # padding

    def by_definition(self) -> tuple[Tensor, Tensor]:
        """Returns q and the caches, computed in float64 and rounded after each operation."""
        heads = self.qkv.unflatten(1, (-1, self.head_dim)).double()
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norms is not None:
            q, k = self._normed(q, self.norms[0]), self._normed(k, self.norms[1])
        caches = self.caches.double()
        writes = self.slots >= 0
        slots, k, v = self.slots[writes], self._rotated(k)[writes], v[writes]
        index, offset = slots // self.block_tokens, slots % self.block_tokens
        caches[0, index, :, offset], caches[1, index, :, offset] = k, v
        return self._rotated(q), caches

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        quotient = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        return self._round(weight.double() * quotient.to(weight.dtype).double())

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.rotary_dim // 2
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return self._round(torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1))

    def prepare(self, backend: str) -> tuple[Tensor, Tensor]:
        """Returns q and the caches as a backend computes them."""
        before = self.caches[:, :1]
        memory = torch.cat((before, self.caches), 1)
        caches = memory[:, 1:]
        prepare, qkv = load_backend(backend, "qkv").prepare, self.qkv.clone()
        k_cache, v_cache = caches
        q = prepare(qkv, self.norms, EPS, self.cos, self.sin, (k_cache, v_cache), self.slots)
        assert torch.equal(memory[:, :1], before), "memory before the first block is written"
        return q, caches


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("norms", ["none", "same", "float32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(9, 4, 2, 64, 64), (1, 3, 1, 20, 8), (0, 2, 2, 8, 8)],
)
def test_the_reference(tokens, heads, kv_heads, head_dim, rotary_dim, dtype, norms):
    norms_type = {"none": None, "same": dtype, "float32": torch.float32}[norms]
    case = Case(tokens, heads, kv_heads, head_dim, rotary_dim, dtype, norms_type)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for got, wanted in zip(case.prepare("reference"), case.by_definition(), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
