"""Activations, with and without a gate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.triton.activation import (
    gelu,
    gelu_and_mul,
    gelu_tanh_and_mul,
    scale,
    silu_and_mul,
    softcap,
)
from tests.kernels.triton.oracle import TYPES, close, rounds_like

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in a size of models."""
    x = torch.empty(2, 2 * 3072, dtype=dtype)
    yield silu_and_mul(x)
    yield gelu_and_mul(x)
    yield gelu_tanh_and_mul(x)
    yield scale(x, 3.3)
    yield gelu(x)
    yield softcap(x, 30.0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 2 * 1025)])
def test_gated(dtype, shape):
    """The activation is rounded before the product."""
    x = (torch.randn(shape) * 3).to(dtype)
    x[:1, :4] = torch.tensor([-200.0, 90.0, -6.0, 0.0])
    gate, up = x.double().chunk(2, dim=-1)
    silu = (gate / (1 + torch.exp(-gate))).to(dtype).double()
    rounds_like(silu_and_mul(x), silu * up, dtype)
    whole = (gate * (1 + torch.erf(gate / 2**0.5)) / 2).to(dtype).double()
    # 1 + erf(x) loses bits, so that a few more elements are rounded to the other side.
    close(gelu_and_mul(x), whole * up, dtype)
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    whole = (gate * (1 + torch.tanh(u)) / 2).to(dtype).double()
    close(gelu_tanh_and_mul(x), whole * up, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (2, 9), (2, 1, 1025)])
def test_scale(dtype, shape):
    """The factor is rounded to the type."""
    x = torch.randn(shape).to(dtype)
    assert torch.equal(scale(x, 25.298221281347036), x * torch.tensor(25.298221281347036).to(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gelu(dtype):
    x = (torch.randn(2, 3, 100) * 3).to(dtype)
    wide = x.double()
    close(gelu(x), wide * (1 + torch.erf(wide / 2**0.5)) / 2, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (2, 9), (2, 1, 1025)])
def test_softcap(dtype, shape):
    """Each operation is rounded to the type."""
    x = (torch.randn(shape) * 40).to(dtype)
    close(softcap(x, 30.0), (torch.tanh(x / 30.0) * 30.0).double(), dtype)
