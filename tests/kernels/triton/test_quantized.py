"""Products with quantized weights: close to the definition with the dequantized weight. The bits of
a row depend neither on the other rows nor on its place among them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swell.kernels.triton import quantized
from swell.kernels.triton.linear import (
    embedding,
    embedding_part,
    linear,
    linear_argmax,
    pack_quantized,
)
from swell.kernels.weights.quantized import GROUPS, Numbers, PackedQuantizedTensor, QuantizedTensor
from tests.kernels.test_linear import in_doubles
from tests.kernels.test_quantized import FLOATS, random_weight
from tests.kernels.triton.interpreter import record_variants
from tests.kernels.triton.oracle import TYPES, close, rounds_like

pytestmark = pytest.mark.slow

Form = dict[str, Any]
"""Arguments of `random_weight`."""
_NUMBERS = [{"mins": mins, "wide": wide} for mins in (False, True) for wide in (False, True)]
FORMS: list[Form] = [
    {"bits": bits, "group": group, **_NUMBERS[(at + bits // 4) % 4]}
    for bits in (4, 8)
    for at, group in enumerate(GROUPS)
]
"""Each group and each type of scales with both sizes of integers."""
FORMS += [form for form in FLOATS if form["group"] != 32 or form["numbers"] is Numbers.E2M1]
COMPILED: list[Form] = [
    {"bits": bits, "group": group, "mins": group != GROUPS[0], "wide": group == 128}
    for bits in (4, 8)
    for group in (GROUPS[0], 128, GROUPS[-1])
]
COMPILED += [
    {"bits": 4, "group": 32, "numbers": Numbers.E2M1},
    {"bits": 8, "group": 128, "wide": True, "numbers": Numbers.E4M3},
]
"""Groups of less than a tile, of a tile and of more."""


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models: few and many outputs, with and without a bias."""
    many = quantized.MANY_OUTPUTS
    for form in COMPILED:
        for outs, bias in ((1024, None), (many, torch.empty(many, dtype=dtype))):
            weight = empty_weight(outs, 4096, dtype, form)
            yield linear(torch.empty(3, 4096, dtype=dtype), weight, bias)
        yield embedding(torch.empty(3, dtype=torch.int64), weight)


def empty_weight(outs: int, size: int, dtype: torch.dtype, form: Form) -> PackedQuantizedTensor:
    """Returns a packed weight without values."""
    of_weight = random_weight(1, form["group"], **form).form
    shape = outs // quantized.PANEL, size // of_weight.group, of_weight.block_bytes(quantized.PANEL)
    data = torch.empty(shape, dtype=torch.uint8)
    return PackedQuantizedTensor(data, outs, size, of_weight, dtype, rounded_activations=False)


def made(rows: int, size: int, outs: int, dtype: torch.dtype, form: Form) -> tuple[Tensor, Any]:
    """Returns random inputs and a weight whose outputs are of the order of 1."""
    return (3 * torch.randn(rows, size) / size**0.5).to(dtype), random_weight(outs, size, **form)


def sizes_of(form: Form) -> list[tuple[int, int, int]]:
    """Returns rows, inputs and outputs: one group, and parts of tiles and panels."""
    group = form["group"]
    return [(0, group, 4), (1, group, 1), (3, 3 * group, 33), (70, group, 70)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_definition(form: Form, dtype: torch.dtype) -> None:
    for rows, size, outs in sizes_of(form):
        x, weight = made(rows, size, outs, dtype, form)
        bias, packed = torch.randn(outs).to(dtype), pack_quantized(weight, dtype)
        plain = weight.dequantize(dtype)
        agrees = rounds_like if rows == 70 else close  # few results may all be near a border
        agrees(linear(x, packed), in_doubles(x, plain, None), dtype)
        agrees(linear(x, packed, bias), in_doubles(x, plain, bias), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_equal_the_dequantized_weight(form: Form, dtype: torch.dtype) -> None:
    """Bit for bit. Ids of other rows give zeros."""
    for size, outs in ((form["group"], 1), (5 * form["group"], 70), (form["group"], 64)):
        weight = random_weight(outs, size, **form)
        packed, plain = pack_quantized(weight, dtype), weight.dequantize(dtype)
        panels = packed.data.repeat(2, 1, 1)[: len(packed.data)]  # others follow in memory
        packed = replace(packed, data=panels)
        ids = torch.tensor([[outs - 1, 0], [outs // 2, 0]])
        assert torch.equal(embedding(ids, packed), plain[ids])
        assert torch.equal(embedding(ids[:, 0].int(), packed), plain[ids[:, 0]])
        assert embedding(ids[0, :0], packed).shape == (0, size)
        part = embedding_part(torch.tensor([99, 100, 99 + outs, 100 + outs, 0]), packed, 100)
        zeros = torch.zeros(size, dtype=dtype)
        assert torch.equal(part, torch.stack([zeros, plain[0], plain[outs - 1], zeros, zeros]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", COMPILED, ids=str)
def test_the_bits_of_a_row_do_not_depend_on_its_batch(
    form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without others, at the beginning, in the middle and at the end of one row more than a
    tile has, and between rows that have failed."""
    variants = record_variants(monkeypatch)
    size, last = -(-160 // form["group"]) * form["group"], 16 if dtype == torch.float32 else 64
    x, weight = made(last + 2, size, 40, dtype, form)
    x, row, packed = x[: last + 1], x[last + 1], pack_quantized(weight, dtype)
    alone = linear(row[None], packed)[0]
    close(alone, row.double() @ weight.dequantize(dtype).double().T, dtype)
    for place in (0, 3, last - 1, last):
        for filling in (None, float("nan")):
            batch = x.clone() if filling is None else torch.full_like(x, filling)
            batch[place] = row
            assert torch.equal(linear(batch, packed)[place], alone), (place, filling)
    assert len(variants) == 1, variants


@pytest.mark.parametrize("outs", [1, 20, 33, 70])
@pytest.mark.parametrize("many", [40, 1000])
def test_fewer_outputs_have_the_same_bits(monkeypatch, outs: int, many: int) -> None:
    """The head computes the outputs of its tokens; the padded rows of its weight are left out. One
    or two panels in a program."""
    monkeypatch.setattr(quantized, "MANY_OUTPUTS", many)
    x, weight = made(3, 320, 70, torch.bfloat16, {"bits": 8})
    packed = pack_quantized(weight, torch.bfloat16)
    largest, index = linear_argmax(x, packed, outs)
    wanted = linear(x, packed)
    rounds_like(wanted, in_doubles(x, weight.dequantize(torch.bfloat16), None), torch.bfloat16)
    wanted = wanted[:, :outs].max(1)
    assert torch.equal(largest, wanted.values.float()) and torch.equal(index, wanted.indices)


def test_nothing_is_written_outside_the_results(monkeypatch) -> None:
    x, weight = made(5, 64, 40, torch.float32, {"bits": 4})
    packed, memory = pack_quantized(weight, torch.float32), torch.full((200, 64), 7.0)
    monkeypatch.setattr(torch, "empty", lambda shape, **_: memory.view(-1)[: math.prod(shape)])
    linear(x, packed)
    assert (memory.view(-1)[5 * 40 :] == 7).all()
    embedding(torch.tensor([3, 39]), packed)
    assert (memory.view(-1)[5 * 40 :] == 7).all()


def test_shapes_and_strides() -> None:
    """Inputs may have any leading dimensions, and be a slice of a wider tensor."""
    x, weight = made(6, 64, 10, torch.float32, {"bits": 4})
    packed = pack_quantized(weight, torch.float32)
    wide = torch.cat([torch.randn(6, 5), x, torch.randn(6, 2)], 1)
    rows = linear(x, packed)
    assert torch.equal(linear(wide[:, 5:69], packed), rows)
    assert torch.equal(linear(x.view(2, 3, 64), packed), rows.view(2, 3, 10))


def test_the_largest_integers() -> None:
    """All bits of a word belong to integers, also its sign."""
    for bits in (4, 8):
        for value in (0, 1, 2**bits - 2, 2**bits - 1):
            integers = torch.full((33, 64), value, dtype=torch.uint8)
            weight = QuantizedTensor(integers, torch.ones(33, 2, dtype=torch.float16), None, bits)
            found = linear(torch.ones(2, 64), pack_quantized(weight, torch.float32))
            assert (found == 64 * (value - 2 ** (bits - 1))).all()


@pytest.mark.parametrize("numbers", [Numbers.E2M1, Numbers.E4M3], ids=str)
def test_every_small_float(numbers: Numbers) -> None:
    """Also those below the least normal number, with scales near both ends of float32."""
    values = numbers.float_values(torch.device("cpu"))
    codes = torch.arange(len(values), dtype=torch.uint8)[values.isfinite()]
    integers = codes.repeat(32 * 8)[: 32 * 32 * 7].view(32, -1)
    for scale in (1.0, 2.0**-100, 2.0**118):
        scales = torch.full((32, integers.shape[1] // 32), scale)
        weight = QuantizedTensor(integers, scales, None, numbers.float_bits, numbers)
        packed = pack_quantized(weight, torch.float32)
        found = embedding(torch.arange(32), packed)
        assert torch.equal(found, values[integers.long()] * scale)
        assert torch.equal(found, weight.dequantize(torch.float32))


def test_a_product_and_a_lookup_are_one_launch_each(monkeypatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    found: list[str] = []
    call = GridExecutor.__call__

    def counted(grid: Any, *args: Any, **kwargs: Any) -> None:
        found.append(grid.fn.__name__)
        call(grid, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    x, weight = made(5, 64, 40, torch.bfloat16, {"bits": 4})
    packed = pack_quantized(weight, torch.bfloat16)
    linear(x, packed, torch.zeros(40, dtype=torch.bfloat16))
    embedding_part(torch.arange(9), packed, 3)
    assert found == ["_quantized_linear", "_quantized_embedding"]
