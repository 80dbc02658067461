"""RMS norm and layer norm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swell.kernels.triton.norm import add_rms_norm, layer_norm, rms_norm
from tests.kernels.triton.oracle import TYPES, close, rounds_like

pytestmark = pytest.mark.slow

EPS = 1e-5


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models: heads, and hidden states."""
    wide = torch.empty(4, 48 * 128, dtype=dtype)
    yield rms_norm(wide[:, : 32 * 128].unflatten(1, (32, 128)), wide[0, :128], EPS)
    for size in (1024, 8192, 16384):
        x = torch.empty(4, size, dtype=dtype)
        yield add_rms_norm(x, x, x[0], EPS)
        yield layer_norm(x, x[0], x[0], EPS, x)
        yield add_rms_norm(x, x, x[0].float(), EPS)


def rms_by_definition(x: Tensor, weight: Tensor) -> Tensor:
    """The quotient is rounded to the weight's type before the product."""
    wide = x.double()
    quotient = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return weight.double() * quotient.to(weight.dtype).double()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 7), (3, 128), (2, 1040), (3, 2, 32)])
def test_rms_norm(dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    rounds_like(rms_norm(x, weight, EPS), rms_by_definition(x, weight), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm_of_heads_in_a_wider_tensor(dtype):
    wide, weight = torch.randn(3, 300).to(dtype), torch.randn(20).to(dtype)
    x = wide[:, 30:90].unflatten(1, (3, 20))
    rounds_like(rms_norm(x, weight, EPS), rms_by_definition(x, weight), dtype)
    every_second = wide[:, ::2].unflatten(1, (3, 50))[:, :, :20]
    rounds_like(rms_norm(every_second, weight, EPS), rms_by_definition(every_second, weight), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [9, 64, 520])
@pytest.mark.parametrize("is_wide", [False, True])
def test_add_rms_norm(dtype, size, is_wide):
    """The sum is rounded to the type of its terms, as torch does, before it is normed; the quotient
    is rounded to the type of the weight."""
    x, residual, weight = torch.randn(4, size), torch.randn(4, size), torch.randn(size)
    x, residual = x.to(dtype), residual.to(dtype)
    weight = weight if is_wide else weight.to(dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    rounds_like(normed, rms_by_definition(x + residual, weight), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [7, 128])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_layer_norm(dtype, size, has_bias, adds):
    x, residual = ((torch.randn(3, size) * 3 + 1).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size).to(dtype) for _ in range(2))
    total = (x + residual if adds else x).double()
    centered = total - total.mean(-1, keepdim=True)
    wanted = centered / (centered.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    wanted = wanted + bias.double() if has_bias else wanted
    got = layer_norm(x, weight, bias if has_bias else None, EPS, residual if adds else None)
    rounds_like(got, wanted, dtype)


def test_other_types_are_left_to_the_reference():
    x = torch.randn(2, 8, dtype=torch.float64)
    close(rms_norm(x, x[0], EPS).float(), rms_by_definition(x, x[0]), torch.float32)
