"""Decode steps and a prompt of the 8B shape, and the same with quantized weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swell.kernels import backends
from swell.kernels.weights.quantized import Numbers, QuantizedTensor
from swell.worker.layers.packed_weight import FP8_GPU
from tests.gpu_report.engines import write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale, Shape
from tests.gpu_report.stages import decode, prefill


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("8B", "tiny")]
    sizes = scale.pick([(1, 192), (64, 192), (64, 2048)], [(1, 8)])
    figures = _products(scale, shape) | _float8_products(scale, shape)
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        figures |= decode.measure(scale, folder, shape, sizes, scale.pick(32, 2))
        figures |= prefill.measure(scale, folder, shape, scale.pick([2000], [20]))
        int4 = {"model__quantize": "int4"}
        found = decode.measure(scale, folder, shape, sizes[:2], scale.pick(32, 2), "int4", **int4)
    # The limit of the whole weights is not that of quantized ones.
    return figures | {name: value for name, value in found.items() if name.endswith(", ms")}


def _products(scale: Scale, shape: Shape) -> Figures:
    """Measures products with one quantized matrix, which are compared with those of torch in
    bfloat16. Asserts that a row has the same bits by itself and among others."""
    figures: Figures = {}
    linear = backends.get("linear", scale.device)
    outs, size = shape.intermediate, shape.hidden
    for form, weight in _weights(outs, size, scale.device):
        if weight.numbers not in linear.numbers():
            continue
        packed = linear.pack_quantized(weight, torch.bfloat16)
        plain, alone = weight.dequantize(torch.bfloat16), None
        for rows in scale.pick((1, 16, 64, 2048), (1, 3)):
            generator = torch.Generator(scale.device).manual_seed(0)
            x = torch.randn(rows, size, generator=generator, device=scale.device).bfloat16()
            x[0] = x.new_tensor(range(size)) / size
            found, wanted = linear.linear(x, packed), x.float() @ plain.float().T
            torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2 * size**0.5 / 4)
            alone = found[0] if alone is None else alone
            assert torch.equal(found[0], alone), f"{form}: a row of {rows} has other bits"
            name, calls = f"product of {rows} rows", scale.pick(50, 1)
            ours = scale.queued_seconds(partial(linear.linear, x, packed), calls)
            torchs = scale.queued_seconds(partial(torch.nn.functional.linear, x, plain), calls)
            figures[f"{name}, {form}, us"] = round(ours * 1e6, 1)
            figures[f"{name}, {form} over bfloat16"] = round(ours / torchs, 2)
            limit = scale.times_limit(ours, packed.data.nbytes)
            figures[f"{name}, {form}, times the limit"] = limit
    return figures


def _float8_products(scale: Scale, shape: Shape) -> Figures:
    """Measures products of FP8 by FP8, which are compared with those of the dequantized weight and
    the inputs that are rounded to FP8 here. On a CPU the reference computes, without rounding."""
    if scale.is_full and torch.cuda.get_device_capability() < FP8_GPU:
        return {"product of FP8 by FP8": f"needs compute capability {FP8_GPU}"}
    linear: Any = backends.get("linear", scale.device)
    if Numbers.E4M3 not in linear.numbers():
        linear = backends.load("reference", "linear")
    figures: Figures = {}
    outs, size = shape.intermediate, shape.hidden
    weight = dict(_weights(outs, size, scale.device))[Numbers.E4M3.value]
    weight.scales.copy_(weight.scales[:, :1].clone())
    packed = linear.pack_quantized(weight, torch.bfloat16, rounded_activations=True)
    plain = weight.dequantize(torch.bfloat16)
    for rows in scale.pick((1, 16, 64, 2048), (1, 3)):
        x = torch.randn(rows, size, device=scale.device).bfloat16()
        scales = x.float().abs().amax(1, keepdim=True) / 448
        rounded = (x.float() / scales).to(torch.float8_e4m3fn).float() * scales
        wanted = scale.pick(rounded, x.float()) @ weight.dequantize(torch.float32).T
        found = linear.linear(x, packed).float()
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * size**0.5 / 4)
        name, calls = f"product of {rows} rows, FP8 by FP8", scale.pick(50, 1)
        ours = scale.queued_seconds(partial(linear.linear, x, packed), calls)
        torchs = scale.queued_seconds(partial(torch.nn.functional.linear, x, plain), calls)
        figures[f"{name}, us"] = round(ours * 1e6, 1)
        figures[f"{name} over bfloat16"] = round(ours / torchs, 2)
        figures[f"{name}, times the limit"] = scale.times_limit(ours, packed.data.nbytes)
    return figures


def _weights(outs: int, size: int, device: str) -> Iterator[tuple[str, QuantizedTensor]]:
    """Yields random weights in the forms of checkpoints, and their names: integers in groups of 32,
    MXFP4, and FP8 in blocks of 128 inputs, or of all inputs if there are fewer."""
    for numbers, bits, group, type_ in (
        (Numbers.INTEGERS, 4, 32, torch.float16),
        (Numbers.INTEGERS, 8, 32, torch.float16),
        (Numbers.E2M1, 4, 32, torch.float16),
        (Numbers.E4M3, 8, min(128, size), torch.float32),
    ):
        codes = torch.randint(2**bits, (outs, size), dtype=torch.uint8, device=device)
        if numbers is Numbers.E4M3:
            codes[codes & 127 == 127] = 0  # NaN
        scales = torch.rand(outs, size // group, device=device) / 2**bits
        name = f"int{bits}" if numbers is Numbers.INTEGERS else numbers.value
        yield name, QuantizedTensor(codes, scales.to(type_), None, bits, numbers)
