"""Norms, rotation and cache write in one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.triton.qkv import prepare
from tests.kernels.test_qkv import EPS, Case
from tests.kernels.triton.oracle import TYPES, rounds_like

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernel in sizes of models: Qwen3, and llama with heads of 64 to 256."""
    for head_dim, has_norms in ((128, True), (64, False), (96, True), (256, False)):
        qkv, cache = torch.empty(3, 24 * head_dim, dtype=dtype), torch.empty(9, 4, 16, head_dim)
        caches, weight = (cache.to(dtype), cache.to(dtype)), torch.empty(head_dim, dtype=dtype)
        angles = torch.empty(3, head_dim // 2)
        slots = torch.empty(3, dtype=torch.int64)
        for norm in (weight, weight.float()):
            norms = (norm, norm) if has_norms else None
            yield prepare(qkv, norms, EPS, angles, angles, caches, slots)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("norms", ["none", "same", "float32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(3, 4, 2, 64, 64), (2, 3, 1, 80, 32), (1, 1, 1, 256, 256), (0, 2, 2, 8, 8)],
)
def test_definition(tokens, heads, kv_heads, head_dim, rotary_dim, dtype, norms):
    norms_type = {"none": None, "same": dtype, "float32": torch.float32}[norms]
    case = Case(tokens, heads, kv_heads, head_dim, rotary_dim, dtype, norms_type)
    for got, wanted in zip(case.prepare("triton"), case.by_definition(), strict=True):
        rounds_like(got, wanted, dtype)


def test_the_rotation_equals_separate_operations():
    """In float32 it is equal to that of the reference bit for bit."""
    case = Case(2, 4, 2, 64, 48, torch.float32, norms_type=None)
    for got, wanted in zip(case.prepare("triton"), case.prepare("reference"), strict=True):
        assert torch.equal(got, wanted)


def test_parts_that_are_not_rotated_may_be_infinite():
    case = Case(1, 1, 1, 16, 8, torch.float32, norms_type=None)
    case.qkv[:, 8:16] = float("inf")
    q, _ = case.prepare("triton")
    assert torch.equal(q[:, :, 8:], case.qkv[:, None, 8:16])
    assert q[:, :, :8].isfinite().all()
