"""Products of FP8 by FP8: those of the dequantized weight with rounded inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swell.kernels.host.host_reads import RefuseHostReads
from swell.kernels.triton import float8
from swell.kernels.triton.float8 import RowScaledTensor
from swell.kernels.triton.linear import (
    embedding,
    embedding_part,
    linear,
    linear_argmax,
    pack_quantized,
)
from swell.kernels.weights.quantized import Numbers, QuantizedTensor
from tests.kernels.test_quantized import random_weight
from tests.kernels.triton.oracle import close
from tests.kernels.triton.test_launches import Launches

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


def launches(dtype: torch.dtype) -> Iterator[object]:
    """Launches the kernel for rows that one program reads at once, and for longer ones."""
    if dtype == BF16:
        for size in (1024, 14336):
            yield linear(torch.empty(3, size, dtype=BF16), packed(scaled_by_rows(32, size)))


def scaled_by_rows(outs: int, size: int, wide: bool = True) -> QuantizedTensor:
    weight = random_weight(outs, size, 8, group=16, wide=wide, numbers=Numbers.E4M3)
    weight.scales.copy_(weight.scales[:, :1].clone())
    return weight


def packed(weight: QuantizedTensor) -> RowScaledTensor:
    found = pack_quantized(weight, BF16, rounded_activations=True)
    assert isinstance(found, RowScaledTensor)
    return found


def rounded(x: Tensor) -> Tensor:
    """Returns the inputs as `pack_quantized` describes, float64."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    floats = (x.float() / torch.where(scale == 0, 1.0, scale)).to(torch.float8_e4m3fn)
    return floats.double() * scale.double()


@pytest.mark.parametrize(
    ("rows", "size", "outs"), [(0, 16, 16), (1, 16, 32), (3, 80, 16), (70, 272, 48)]
)
def test_a_product_has_rounded_inputs(
    rows: int, size: int, outs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one part and of several; some are zero, or have tiny or large numbers."""
    monkeypatch.setattr(float8, "ROW_INPUTS", 64)
    weight, bias = scaled_by_rows(outs, size), torch.randn(outs).to(BF16)
    x, by_rows = (torch.randn(rows, size) / size**0.5).to(BF16), packed(weight)
    x[1:2], x[2:3], x[5:6] = 0, x[2:3] * 2.0**-20, x[5:6] * 2.0**20
    with RefuseHostReads():
        with_bias, found = linear(x, by_rows, bias), linear(x, by_rows)
    plain = weight.dequantize(torch.float32).double()
    wanted = rounded(x) @ plain.T
    close(found, wanted, BF16)
    close(with_bias, wanted + bias.double(), BF16)
    exact, scale = x.double() @ plain.T, x.double().abs().amax(1, keepdim=True) / 448
    bound = torch.maximum(x.double().abs() / 16, scale / 1024) @ plain.abs().T
    assert ((found.double() - exact).abs() <= bound + exact.abs() * 2**-7).all()
    if rows:
        largest, index = linear_argmax(x, by_rows, outs - 3)
        assert torch.equal(largest, found[:, : outs - 3].max(1).values.float())
        assert torch.equal(found.gather(1, index[:, None])[:, 0].float(), largest)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_fails_its_row_only(number: float) -> None:
    x, by_rows = torch.randn(3, 64).to(BF16), packed(scaled_by_rows(32, 64))
    x[1, 5] = number
    found = linear(x, by_rows)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_shapes_and_strides() -> None:
    x, by_rows = torch.randn(6, 64).to(BF16), packed(scaled_by_rows(32, 64))
    wide, found = torch.cat([x, x[:, :5]], 1), linear(x, by_rows)
    assert torch.equal(linear(wide[:, :64], by_rows), found)
    assert torch.equal(linear(x.view(2, 3, 64), by_rows), found.view(2, 3, 32))


@pytest.mark.parametrize("wide", [False, True])
def test_a_packed_weight_is_the_weight(wide: bool) -> None:
    weight = scaled_by_rows(48, 64, wide)
    by_rows, plain = packed(weight), weight.dequantize(BF16)
    found = by_rows.unpack()
    assert found.form == weight.form == by_rows.form
    assert torch.equal(found.dequantize(BF16), plain)
    ids = torch.tensor([[47, 0], [5, 5]])
    assert torch.equal(embedding(ids, by_rows), plain[ids])
    part = embedding_part(torch.tensor([99, 100, 147, 148]), by_rows, 100)
    zeros = torch.zeros(64, dtype=BF16)
    assert torch.equal(part, torch.stack([zeros, plain[0], plain[47], zeros]))


def test_other_weights_are_dequantized_in_the_tile() -> None:
    """Several scales in a row, integers, sizes that are not multiples of 16, and other types."""
    weight = scaled_by_rows(32, 64)
    weight.scales[3, 1] *= 2
    others = [
        weight,
        replace(scaled_by_rows(32, 64), numbers=Numbers.INTEGERS),
        scaled_by_rows(33, 64),
    ]
    for other in others:
        found = pack_quantized(other, BF16, rounded_activations=True)
        assert not isinstance(found, RowScaledTensor) and not found.rounded_activations
    half = pack_quantized(scaled_by_rows(32, 64), torch.float16, rounded_activations=True)
    exact = pack_quantized(scaled_by_rows(32, 64), BF16)
    assert not isinstance(half, RowScaledTensor) and not isinstance(exact, RowScaledTensor)


def test_a_product_is_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, by_rows = torch.randn(5, 64).to(BF16), packed(scaled_by_rows(32, 64))
    bias, counted = torch.zeros(32, dtype=BF16), Launches(monkeypatch)
    with counted:
        linear(x, by_rows, bias)
    assert counted.found == ["triton _round_rows", "_scaled_mm"]
