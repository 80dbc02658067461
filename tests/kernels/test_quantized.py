"""Products with quantized weights: every backend against the dequantized weight, and the bits of a
row do not depend on the other rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from swell.kernels.weights.quantized import (
    GROUP,
    Numbers,
    PackedQuantizedTensor,
    QuantizedTensor,
    quantize,
)
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

TYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 64, 32), (1, 32, 1), (1, 320, 1000), (2, 64, 31), (7, 384, 65), (33, 640, 96)]
SHAPES += [(6, 128, 1050), (200, 128, 33)]
"""Rows, inputs, outputs: parts of tiles, panels, pairs of panels and blocks, several of each."""
EPS = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""The rounding of a result, relative to the sum of the magnitudes of its products."""


def backend(name: str):
    return load_backend(name, "linear")


def random_weight(
    outs: int,
    size: int,
    bits: int,
    group: int = 32,
    mins: bool = False,
    wide: bool = False,
    numbers: Numbers = Numbers.INTEGERS,
) -> QuantizedTensor:
    integers = torch.randint(0, 2**bits, (outs, size), dtype=torch.uint8)
    if numbers is Numbers.E4M3:
        integers[integers & 127 == 127] = 1  # NaN
    scale_type = torch.float32 if wide else torch.float16
    scales = (torch.rand(outs, size // group) / 2**bits).to(scale_type)
    low = (torch.randn(outs, size // group) / 4).to(scale_type) if mins else None
    return QuantizedTensor(integers, scales, low, bits, numbers)


FORMS = [
    *({"bits": 8}, {"bits": 4}, {"bits": 4, "mins": True}, {"bits": 8, "mins": True, "wide": True}),
    *({"bits": 8, "group": 16, "wide": True}, {"bits": 4, "group": 16, "mins": True}),
    *({"bits": 4, "group": 64, "wide": True}, {"bits": 4, "group": 128, "mins": True}),
]
FLOATS = [
    {"bits": numbers.float_bits, "group": group, "wide": group == 32, "numbers": numbers}
    for numbers in (Numbers.E2M1, Numbers.E4M3)
    for group in (16, 32, 256)
]


def quantized_rows(x: Tensor, group: int) -> Tensor:
    """x [rows, in] with each group rounded as `pack_quantized` describes, as float64."""
    groups = x.float().unflatten(1, (-1, group))
    most = groups.abs().amax(2, keepdim=True)
    # The factor is a float32; products with it are rounded once, to an integer.
    integers = (groups.double() * (127 / most).double()).round()
    return torch.where(most == 0, 0.0, integers * (most / 127).double()).flatten(1)


@pytest.mark.parametrize(
    ("numbers", "exponent", "mantissa"), [(Numbers.E2M1, 2, 1), (Numbers.E4M3, 4, 3)]
)
def test_small_floats_have_a_sign_an_exponent_and_a_mantissa(numbers, exponent, mantissa):
    """With a bias of 2 ** (exponent bits - 1) - 1, and smaller numbers without a leading 1."""
    values, bias = numbers.float_values(torch.device("cpu")).tolist(), 2 ** (exponent - 1) - 1
    assert len(values) == 2**numbers.float_bits
    for code, value in enumerate(values):
        sign, rest = divmod(code, len(values) // 2)
        e, m = divmod(rest, 2**mantissa)
        if numbers is Numbers.E4M3 and rest == 127:
            assert math.isnan(value)
            continue
        part = m / 2**mantissa + (e > 0)
        assert value == (-1) ** sign * part * 2.0 ** (max(e, 1) - bias)


@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_a_float_is_multiplied_by_the_scale_of_its_group(form):
    torch.manual_seed(0)
    weight, numbers = random_weight(3, 512, **form), form["numbers"]
    scales = weight.scales.float().repeat_interleave(form["group"], 1)
    values = numbers.float_values(torch.device("cpu"))[weight.integers.long()]
    assert torch.equal(weight.dequantize(torch.float32), values * scales)
    module = backend("reference")
    packed, plain = module.pack_quantized(weight, torch.float32), weight.dequantize(torch.float32)
    x = torch.randn(2, 512)
    assert torch.equal(module.linear(x, packed), module.linear(x, plain))
    assert numbers in module.numbers() and numbers not in backend("cpu").numbers()


@pytest.mark.parametrize("form", [*FORMS, *FLOATS], ids=str)
@pytest.mark.parametrize("outs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("panel", [1, 16, 32])
def test_a_packed_weight_is_the_weight(form, outs, panel):
    torch.manual_seed(0)
    weight = random_weight(outs, 256, **form)
    packed = PackedQuantizedTensor.pack(weight, panel, torch.float32, False)
    blocks = (-(-outs // panel), 256 // weight.form.group, weight.form.block_bytes(panel))
    assert packed.data.shape == blocks and packed.form == weight.form
    found = packed.unpack()
    assert torch.equal(found.integers, weight.integers)
    assert torch.equal(found.scales, weight.scales)
    assert (found.mins is None) == (weight.mins is None)
    assert weight.mins is None or torch.equal(found.mins, weight.mins)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "size", "outs"), [s for s in SHAPES if s[1] % 128 == 0])
def test_linear_equals_the_product_with_the_dequantized_weight(name, dtype, form, rows, size, outs):
    """With packed weights, bit for bit."""
    torch.manual_seed(0)
    module, weight = backend(name), random_weight(outs, size, **form)
    x, bias = torch.randn(rows, size).to(dtype), torch.randn(outs).to(dtype)
    packed = module.pack_quantized(weight, dtype)
    plain = module.pack(weight.dequantize(dtype))
    assert torch.equal(module.linear(x, packed, bias), module.linear(x, plain, bias))
    assert torch.equal(module.linear(x, packed), module.linear(x, plain))
    found = module.linear_argmax(x, packed, (outs + 1) // 2)
    expected = module.linear_argmax(x, plain, (outs + 1) // 2)
    assert all(map(torch.equal, found, expected))
    ids = torch.tensor([outs - 1, 0, outs // 2, 0])
    assert torch.equal(module.embedding(ids, packed), module.embedding(ids, plain))


@pytest.mark.parametrize("integers", [False, True])
def test_float16_of_cpu_is_computed_by_the_reference(integers):
    torch.manual_seed(0)
    weight, x = random_weight(40, 64, 4), torch.randn(5, 64).half()
    module, packed = backend("cpu"), backend("cpu").pack_quantized(weight, torch.half, integers)
    plain = weight.dequantize(torch.half)
    assert torch.equal(module.linear(x, packed), torch.nn.functional.linear(x, plain))
    assert torch.equal(module.linear_argmax(x, packed, 39)[1], (x @ plain[:39].T).argmax(1))
    ids = torch.tensor([3, 39, 0])
    assert torch.equal(module.embedding(ids, packed), plain[ids])
    assert torch.equal(module.embedding_part(ids + 5, packed, 5), plain[ids])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS[:6], ids=str)
@pytest.mark.parametrize(("rows", "size", "outs"), SHAPES)
def test_integer_activations_of_cpu(dtype, form, rows, size, outs):
    """Products equal those with rounded inputs, and so are within the stated bound of the exact
    ones."""
    torch.manual_seed(0)
    module, weight = backend("cpu"), random_weight(outs, size, **form)
    x, bias = torch.randn(rows, size).to(dtype), torch.randn(outs).to(dtype)
    group = weight.form.group
    if rows > 1:
        x[1, :group] = 0
    packed = module.pack_quantized(weight, dtype, rounded_activations=True)
    found = module.linear(x, packed, bias)
    assert found.dtype == dtype and found.shape == (rows, outs)
    # The products of integers are exact; the weight is never rounded to the type.
    w = weight.dequantize(torch.float32).double()
    expected = quantized_rows(x, group) @ w.T + bias.double()
    magnitudes = x.double().abs() @ w.abs().T + bias.double().abs()
    assert ((found.double() - expected).abs() <= EPS[dtype] * magnitudes).all()

    scales = x.double().abs().unflatten(1, (-1, group)).amax(2).repeat_interleave(group, 1) / 127
    exact = x.double() @ w.T + bias.double()
    bound = scales @ w.abs().T / 2 + EPS[dtype] * magnitudes
    assert ((found.double() - exact).abs() <= bound).all()

    values, which = module.linear_argmax(x, packed, outs)
    y = module.linear(x, packed)
    assert which.tolist() == [row.index(max(row)) for row in y.tolist()]
    assert values.tolist() == [max(row) for row in y.tolist()]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, 16)])
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_cpu_has_the_same_bits_in_any_batch(dtype, bits, group, integers, threads):
    torch.manual_seed(0)
    module, before = backend("cpu"), torch.get_num_threads()
    x = torch.randn(500, 704).to(dtype)
    packed = module.pack_quantized(random_weight(333, 704, bits, group), dtype, integers)
    whole = module.linear(x, packed)
    torch.set_num_threads(threads)
    try:
        for start, stop in [(0, 1), (499, 500), (3, 8), (100, 113), (7, 300)]:
            assert torch.equal(module.linear(x[start:stop], packed), whole[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("integers", [False, True])
def test_inputs_that_are_views_of_cpu(dtype, integers):
    torch.manual_seed(0)
    module = backend("cpu")
    packed = module.pack_quantized(random_weight(40, 64, 4), dtype, integers)
    wide = torch.randn(6, 200).to(dtype)
    for x in (
        wide[:, 30:94],
        wide[::2, :64],
        wide[:, ::2][:, :64],
        wide[:, :64].unflatten(0, (2, 3)),
    ):
        y = module.linear(x, packed)
        assert y.shape == (*x.shape[:-1], 40)
        assert torch.equal(y, module.linear(x.contiguous(), packed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_reaches_only_its_row_of_cpu(bits, bad):
    torch.manual_seed(0)
    module, x = backend("cpu"), torch.randn(9, 64)
    weight = random_weight(40, 64, bits)
    expected = module.linear(x, module.pack_quantized(weight, torch.float32, True))
    x[4, 40] = bad
    found = module.linear(x, module.pack_quantized(weight, torch.float32, True))
    others = [row for row in range(9) if row != 4]
    assert found[4].isnan().all() and torch.equal(found[others], expected[others])
    assert module.linear_argmax(x, module.pack_quantized(weight, torch.float32, True), 40)[0][
        4
    ].isnan()


@pytest.mark.parametrize("integers", [False, True])
def test_tiny_and_huge_inputs_of_cpu(integers):
    """Groups whose scale would be subnormal are zero, and no scale overflows."""
    module, weight = backend("cpu"), random_weight(8, 32, 8)
    packed = module.pack_quantized(weight, torch.float32, integers)
    x = torch.stack([torch.full((32,), each) for each in (0.0, 1e-44, 1e-38, 3e37)])
    found = module.linear(x, packed)
    assert found.isfinite().all() and found[:3].abs().max() < 1e-35
    assert torch.allclose(found[3], x[3] @ weight.dequantize(torch.float32).T, rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6])
def test_quantize_rounds_to_the_nearest(bits, size):
    """8 bits: the error is at most half a step of the group, and a little more where float16 rounds
    the scale. 4 bits: the error of random groups is below that of the simplest scale."""
    torch.manual_seed(0)
    weight = torch.randn(50, 96) * size
    weight[3, 32:64] = 0
    found = quantize(weight, bits)
    assert found.form.group == GROUP and found.mins is None
    error = (found.dequantize(torch.float32) - weight).unflatten(1, (-1, GROUP))
    groups = weight.unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    assert (error[3, 1] == 0).all()
    if bits == 8:
        assert (error.abs() <= most / 127 * 0.57).all()
    else:
        simple = torch.where(most == 0, 0, (groups / most * 7).round() * most / 7)
        assert error.square().sum() < 0.85 * (simple - groups).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_accepts_each_type_and_one_row_at_a_time(dtype, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(7, 64).to(dtype)
    whole = [quantize(weight, bits) for bits in (4, 8)]
    monkeypatch.setattr("swell.kernels.weights.quantized._ROWS_BYTES", 1)
    for bits, expected in zip((4, 8), whole, strict=True):
        found = quantize(weight, bits)
        assert torch.equal(found.integers, expected.integers)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.dequantize(dtype), expected.dequantize(dtype))


def test_the_largest_integers_are_exact_of_cpu():
    """The sums of a group of the largest integers, of either sign, do not overflow."""
    module = backend("cpu")
    for bits, group, sign in itertools.product((4, 8), (16, 32, 128), (1, -1)):
        integers = torch.full((33, 256), 2**bits - 1, dtype=torch.uint8)
        scales, mins = torch.ones(33, 256 // group), torch.zeros(33, 256 // group)
        weight = QuantizedTensor(integers, scales, mins, bits)
        x = torch.full((2, 256), 127.0 * sign)
        found = module.linear(x, module.pack_quantized(weight, torch.float32, True))
        assert (found == 127.0 * sign * (2**bits - 1) * 256).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_groups_far_below_the_others_are_not_lost(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    weight[3, 32:64] *= 1e-6
    weight = weight.to(dtype)
    found = quantize(weight, bits).dequantize(torch.float32)
    groups, errors = (each.unflatten(1, (-1, GROUP)) for each in (weight.float(), found - weight))
    largest = groups.abs().amax(2)
    assert (errors.abs().amax(2) <= largest * (0.15 if bits == 4 else 1 / 250)).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(8, 64)
    weight[5, 40] = value
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantize(weight, 8)
