"""Products with packed weights: close to the definition, and the bits of a row depend neither on
the other rows nor on its place among them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from swell.kernels.linear import PackedTensor
from swell.kernels.triton import linear as column
from swell.kernels.triton.linear import embedding, linear, linear_argmax, pack
from tests.kernels.test_linear import in_doubles
from tests.kernels.triton.interpreter import record_variants
from tests.kernels.triton.oracle import TYPES, close, rounds_like

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[Tensor]:
    """Launches the kernels in sizes of models: few and many outputs, with and without a bias."""
    for outs, size, bias in ((1024, 3072, None), (6144, 4096, torch.empty(6144, dtype=dtype))):
        weight = packed(torch.empty(outs, size, dtype=dtype))
        yield linear(torch.empty(3, size, dtype=dtype), weight, bias)


def packed(weight: Tensor) -> PackedTensor:
    found = pack(weight, exact=True)
    assert isinstance(found, PackedTensor)
    return found


def made(rows: int, size: int, outs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns random inputs and a weight whose outputs are of the order of 1."""
    return torch.randn(rows, size).to(dtype), (torch.randn(outs, size) / size**0.5).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "outs"), [(0, 8, 4), (1, 1, 1), (3, 33, 70), (70, 130, 9), (17, 64, 33)]
)
def test_definition(rows, size, outs, dtype):
    x, weight = made(rows, size, outs, dtype)
    bias = torch.randn(outs).to(dtype)
    rounds_like(linear(x, packed(weight)), in_doubles(x, weight, None), dtype)
    rounds_like(linear(x, packed(weight), bias), in_doubles(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [130, 1000])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(size, dtype, monkeypatch):
    """A row without others, at the beginning, in the middle and at the end of 65 rows, which are
    more than one tile has, and between rows that have failed."""
    variants = record_variants(monkeypatch)
    x, weight = made(65, size, 20, dtype)
    row, weight = torch.randn(size).to(dtype), packed(weight)
    alone = linear(row[None], weight)[0]
    close(alone, (row.double() @ weight.unpack().double().T), dtype)
    for place in (0, 3, 33, 64):
        for filling in (None, float("nan")):
            batch = x.clone() if filling is None else torch.full_like(x, filling)
            batch[place] = row
            assert torch.equal(linear(batch, weight)[place], alone), (place, filling)
    assert len(variants) == 1, variants


@pytest.mark.parametrize("outs", [1, 20, 33])
def test_fewer_outputs_have_the_same_bits(monkeypatch, outs):
    """The head computes the outputs of its tokens; the padded rows of its weight are left out."""
    monkeypatch.setattr(column, "MANY_OUTPUTS", 34)
    x, weight = made(3, 300, 40, torch.bfloat16)
    largest, index = linear_argmax(x, packed(weight), outs)
    wanted = linear(x, packed(weight))[:, :outs].max(1)
    assert torch.equal(largest, wanted.values.float()) and torch.equal(index, wanted.indices)


def test_shapes_and_strides():
    """Inputs may have any leading dimensions, and be a slice of a wider tensor."""
    x, weight = made(6, 24, 10, torch.float32)
    wide = torch.cat([torch.randn(6, 5), x, torch.randn(6, 2)], 1)
    rows = linear(x, packed(weight))
    assert torch.equal(linear(wide[:, 5:29], packed(weight)), rows)
    assert torch.equal(linear(x.view(2, 3, 24), packed(weight)), rows.view(2, 3, 10))


def test_a_packed_weight_shares_the_memory_of_the_weight():
    """Packing costs no memory, and weights that are written in place are used."""
    weight = torch.randn(12, 8)
    same = packed(weight)
    assert same.data.data_ptr() == weight.data_ptr() and torch.equal(same.unpack(), weight)
    ids = torch.tensor([3, 0, 11])
    assert torch.equal(embedding(ids, same), weight[ids])
    assert pack(weight) is weight, "without `exact`, torch computes products"


def test_torch_computes_with_other_weights():
    x, weight = made(4, 16, 6, torch.float32)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    largest, index = linear_argmax(x, weight, 5)
    assert torch.equal(index, (x @ weight[:5].T).argmax(1)) and largest.dtype == torch.float32
    assert torch.equal(embedding(torch.tensor([5]), weight), weight[5:])
