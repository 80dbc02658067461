"""Matrix products: every backend against float64, and the bits of a row with packed weights do not
depend on the other rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swell.kernels.linear import PackedTensor
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

SHAPES = [
    *((0, 64, 32), (1, 64, 32), (1, 300, 1000), (3, 1, 1), (7, 33, 31)),
    *((13, 257, 65), (50, 256, 96), (430, 9, 333), (6, 300, 1050), (2, 9, 5000)),
]
"""Rows, inputs, outputs: parts of tiles, panels, pairs of panels and blocks, and several of
each."""


def backend(name: str):
    return load_backend(name, "linear")


def in_doubles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "outs"), SHAPES)
def test_linear(name, dtype, bias, rows, size, outs):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(outs, size).to(dtype)
    b = torch.randn(outs).to(dtype) if bias else None
    module = backend(name)
    y = module.linear(x, module.pack(weight), b)
    assert y.dtype == dtype and y.shape == (rows, outs)
    scale = size**0.5
    assert torch.allclose(
        y.double(), in_doubles(x, weight, b), rtol=EPS[dtype], atol=EPS[dtype] * scale
    )


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_long_sum_over_many_rows(name):
    """A long sum over many rows spans several blocks of k and several chunks of rows."""
    torch.manual_seed(0)
    x, weight = torch.randn(430, 1000), torch.randn(100, 1000)
    module = backend(name)
    y = module.linear(x, module.pack(weight))
    assert (y.double() - in_doubles(x, weight, None)).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_inputs_that_are_views(name, dtype):
    torch.manual_seed(0)
    module, weight = backend(name), torch.randn(40, 24).to(dtype)
    packed = module.pack(weight)
    wide = torch.randn(6, 60).to(dtype)
    for x in (
        wide[:, 30:54],
        wide[::2, :24],
        wide[:, ::2][:, :24],
        wide[:, :24].unflatten(0, (2, 3)),
    ):
        y, y_dense = module.linear(x, packed), module.linear(x.contiguous(), packed)
        assert y.shape == (*x.shape[:-1], 40)
        torch.testing.assert_close(y, y_dense)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_packed_row_has_the_same_bits_in_any_batch(dtype, threads):
    torch.manual_seed(0)
    module, before = backend("cpu"), torch.get_num_threads()
    x, packed = torch.randn(500, 700).to(dtype), module.pack(torch.randn(333, 700).to(dtype))
    whole = module.linear(x, packed)
    torch.set_num_threads(threads)
    try:
        for start, stop in [(0, 1), (499, 500), (3, 8), (100, 113), (7, 300)]:
            assert torch.equal(module.linear(x[start:stop], packed), whole[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("outs", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("width", [None, 8])
def test_an_unpacked_weight_is_the_weight(dtype, outs, width, monkeypatch):
    """Unpacking returns the original weight, also from panels of another width, which another
    processor has packed."""
    module, weight = backend("cpu"), torch.randn(outs, 9).to(dtype)
    if width is not None:
        monkeypatch.setattr(module, "PANEL", width)
    packed = module.pack(weight)
    assert packed.data.shape == PackedTensor.shape(outs, 9, module.panel(), dtype)
    assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "outs"), SHAPES)
def test_argmax_is_the_first_of_the_largest_outputs(name, dtype, rows, size, outs):
    """The argmax is the first of the largest outputs; two outputs in three equal another one."""
    torch.manual_seed(0)
    module, x = backend(name), torch.randn(rows, size).to(dtype)
    weight = torch.randn(outs, size).to(dtype)
    weight[torch.randint(outs, (2 * outs // 3,))] = weight[torch.randint(outs, (2 * outs // 3,))]
    packed = module.pack(weight)
    y = module.linear(x, packed)
    first = [row.index(max(row)) for row in y.tolist()]
    values, found = module.linear_argmax(x, packed, outs)
    assert found.dtype == torch.int64 and found.tolist() == first
    assert values.dtype == torch.float32 and values.tolist() == [max(row) for row in y.tolist()]
    spread = torch.randn(rows, 2 * size).to(dtype)[:, ::2]
    spread.copy_(x)
    assert torch.equal(module.linear_argmax(spread, packed, outs)[1], found)
    some = (outs + 1) // 2
    for row, value, which in zip(y.tolist(), *module.linear_argmax(x, packed, some), strict=True):
        assert (value, which) == (max(row[:some]), row.index(max(row[:some])))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_padding_is_never_the_linear_argmax_and_nan_is_reported(dtype, sign):
    """The zeros that pad a packed weight are never the argmax; a NaN is reported."""
    module = backend("cpu")
    weight = -sign * torch.arange(1.0, 34.0)[:, None].to(dtype)
    x = torch.full((2, 1), float(sign)).to(dtype)

    assert module.linear_argmax(x, module.pack(weight), 33)[1].tolist() == [0, 0]
    for first in (32, 5, 0):
        weight[first:] = float("nan")
        values, which = module.linear_argmax(x, module.pack(weight), 33)
        assert values.isnan().all() and which.min() >= 0 and which.max() < 33


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_embedding(name, dtype, integer):
    torch.manual_seed(0)
    module, weight = backend(name), torch.randn(71, 40).to(dtype)
    ids = torch.tensor([0, 70, 33, 33, 64, 31, 32], dtype=integer)
    assert torch.equal(module.embedding(ids, module.pack(weight)), weight[ids.long()])
    assert module.embedding(ids[:0], module.pack(weight)).shape == (0, 40)


@pytest.mark.parametrize("name", ["cpu"])
def test_a_panel_is_two_vectors(name):
    """A panel is as wide as two vectors; `test_narrow_vectors.py` sets the width that its library
    must have."""
    wide = " avx512f " in Path("/proc/cpuinfo").read_text()
    expected = os.environ.get("SWELL_TEST_PANEL", "32" if wide else "16")
    assert int(expected) == backend(name).PANEL


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_parts_of_an_embedding_add_up_to_the_whole(name, dtype, packed):
    torch.manual_seed(0)
    module, whole, part = backend(name), torch.randn(50, 33).to(dtype), 17
    ids = torch.tensor([0, 16, 17, 49, 3, 33, 34])
    total = torch.zeros(len(ids), 33, dtype=dtype)
    for start in range(0, 50, part):
        weight = whole[start : start + part]
        own = module.embedding_part(ids, module.pack(weight) if packed else weight, start)
        elsewhere = (ids < start) | (ids >= start + part)
        assert not own[elsewhere].any()
        total += own
    assert torch.equal(total, whole[ids])


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_largest_of_several_parts(name):
    """The first of equal values is selected, and NaN is the largest."""
    nan, low = float("nan"), float("-inf")
    values = torch.tensor([[1, 3, 2], [5, 5, 5], [0, nan, 9], [low, low, -1], [nan, 1, 2.0]])
    indices = torch.tensor([[4, 3, 0], [7, 1, 2], [0, 6, 0], [0, 0, 8], [3, 0, 0]])
    largest, which = backend(name).pick_largest(values, indices, 10)
    assert torch.equal(largest.nan_to_num(99), torch.tensor([3, 5, 99, -1, 99.0]))
    assert which.tolist() == [13, 7, 16, 28, 3]
    strided = backend(name).pick_largest(values.T.contiguous().T, indices, 10)
    assert torch.equal(strided[1], which)
