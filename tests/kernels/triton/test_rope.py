"""Rotary embedding in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.reference import rope as reference
from swell.kernels.triton.rope import apply_rope
from tests.kernels.triton.oracle import TYPES, rounds_like

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernel in sizes of models."""
    for head_dim in (64, 96, 256):
        x, angles = torch.empty(3, 4, head_dim, dtype=dtype), torch.empty(3, head_dim // 2)
        yield apply_rope(x, x, angles, angles)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "head_dim", "rotary"), [(3, 64, 64), (1, 20, 10), (2, 256, 256), (0, 8, 8)]
)
def test_definition(dtype, tokens, head_dim, rotary):
    """The heads are a part of a wider tensor, whose other parts do not change. In float32 the
    result is equal to that of torch's operations bit for bit."""
    angles, half = torch.rand(tokens, rotary // 2) * 100, rotary // 2
    cos, sin = angles.cos(), angles.sin()
    wide = torch.randn(tokens, 8 * head_dim).to(dtype)
    before = wide.clone()
    q, k = wide[:, : 4 * head_dim], wide[:, 4 * head_dim : 6 * head_dim]
    q, k = q.unflatten(1, (4, head_dim)), k.unflatten(1, (2, head_dim))
    a, b = (x.double() for x in (q[..., :half], q[..., half:rotary]))
    c, s = cos.double()[:, None], sin.double()[:, None]
    wanted = torch.cat((a * c - b * s, b * c + a * s, q[..., rotary:].double()), -1)
    apply_rope(q, k, cos, sin)
    rounds_like(q, wanted, dtype)
    reference.apply_rope(before[:, : 4 * head_dim].unflatten(1, (4, head_dim)), k[:, :0], cos, sin)
    assert torch.equal(wide[:, : 4 * head_dim], before[:, : 4 * head_dim])
    assert torch.equal(wide[:, 6 * head_dim :], before[:, 6 * head_dim :])
