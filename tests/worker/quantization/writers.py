"""Writes matrices in published quantized formats, from their descriptions and without our readers.

A writer rounds a matrix [out, in] and returns the tensors that a checkpoint stores for it, by the
suffix of their names, and the exact values that they mean. Packing is done number by number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Suffix -> stored tensor; and the values, float32."""

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """numbers [R, N] -> words [R, ceil(N * bits / 32)]: number i begins at bit i * bits of its
    row."""
    rows, count = numbers.shape
    words = np.zeros((rows, math.ceil(count * bits / 32)), dtype=np.uint64)
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        value = numbers[:, i].astype(np.uint64) << np.uint64(shift)
        words[:, word] |= value & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            words[:, word + 1] |= value >> np.uint64(32)
    return words.astype(np.uint32).view(np.int32)


def integers(
    w: Tensor, bits: int, group: int, symmetric: bool, of_column: np.ndarray, kind: torch.dtype
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Rounds to unsigned integers. Returns levels [out, in], zeros [out, G], scales [out, G] of
    type `kind`, and the values."""
    out, size = w.shape
    count = int(of_column.max()) + 1
    zeros, scales = np.zeros((out, count), dtype=np.int64), np.zeros((out, count), dtype=np.float64)
    levels = np.zeros((out, size), dtype=np.int64)
    values = np.zeros((out, size), dtype=np.float32)
    x = w.double().numpy()
    for g in range(count):
        columns = np.flatnonzero(of_column == g)
        part = x[:, columns]
        if symmetric:
            zeros[:, g] = 2 ** (bits - 1)
            scale = np.abs(part).max(1) / (2 ** (bits - 1) - 0.5)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = np.maximum(high - low, 1e-30) / (2**bits - 1)
            zeros[:, g] = np.clip(np.rint(-low / scale), 0, 2**bits - 1)
        scale = np.where(torch.tensor(scale).to(kind) == 0, 1, scale)
        scales[:, g] = torch.tensor(scale).to(kind).double().numpy()
        raw = np.rint(part / scales[:, g : g + 1]) + zeros[:, g : g + 1]
        levels[:, columns] = np.clip(raw, 0, 2**bits - 1)
        values[:, columns] = (levels[:, columns] - zeros[:, g : g + 1]) * scales[:, g : g + 1]
    return levels, zeros, torch.tensor(scales).to(kind), torch.tensor(values)


def in_order(size: int, group: int) -> np.ndarray:
    return np.arange(size) // (size if group == -1 else group)


def by_activation(size: int, group: int) -> np.ndarray:
    """The groups of inputs that were ordered before they were quantized."""
    groups = np.empty(size, dtype=np.int64)
    groups[np.random.default_rng(5).permutation(size)] = np.arange(size) // group
    return groups


def gptq(
    w: Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
    first: bool = True,
    index: bool = True,
) -> Written:
    """`ordered`: `desc_act`; `first`: the first version of the format, which stores zero - 1;
    `index`: with `g_idx`."""
    of_column = (by_activation if ordered else in_order)(w.shape[1], group)
    levels, zeros, scales, values = integers(w, bits, group, symmetric, of_column, torch.float16)
    if first:
        zeros = (zeros - 1) % 2**bits
    stored = {
        ".qweight": torch.tensor(pack(levels, bits).T.copy()),
        ".qzeros": torch.tensor(pack(zeros.T, bits)),
        ".scales": scales.T.contiguous(),
    }
    if index:
        stored[".g_idx"] = torch.tensor(of_column, dtype=torch.int32)
    return stored, values


def awq(w: Tensor, group: int = 32) -> Written:
    of_column = in_order(w.shape[1], group)
    levels, zeros, scales, values = integers(w, 4, group, False, of_column, torch.float16)

    def words(numbers: np.ndarray) -> Tensor:
        """[N, out] -> [N, out / 8]: in each word, from its lowest bits, the outputs 0, 2, 4, 6, 1,
        3, 5, 7."""
        order = [
            8 * word + i for word in range(numbers.shape[1] // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)
        ]
        return torch.tensor(pack(numbers[:, order], 4))

    stored = {
        ".qweight": words(levels.T),
        ".qzeros": words(zeros.T),
        ".scales": scales.T.contiguous(),
    }
    return stored, values


def packed(
    w: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, ordered: bool = False
) -> Written:
    """pack-quantized of compressed-tensors."""
    of_column = (by_activation if ordered else in_order)(w.shape[1], group)
    levels, zeros, scales, values = integers(w, bits, group, symmetric, of_column, torch.bfloat16)
    stored = {
        ".weight_packed": torch.tensor(pack(levels, bits)),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        stored[".weight_zero_point"] = torch.tensor(pack(zeros.T, bits).T.copy())
    if ordered:
        stored[".weight_g_idx"] = torch.tensor(of_column, dtype=torch.int32)
    return stored, values


def int8(
    w: Tensor,
    group: int = -1,
    symmetric: bool = True,
    ordered: bool = False,
    kind: torch.dtype = torch.bfloat16,
) -> Written:
    """int-quantized of compressed-tensors: signed integers."""
    of_column = (by_activation if ordered else in_order)(w.shape[1], group)
    levels, zeros, scales, values = integers(w, 8, group, symmetric, of_column, kind)
    stored = {".weight": torch.tensor(levels - 128).to(torch.int8), ".weight_scale": scales}
    if not symmetric:
        stored[".weight_zero_point"] = torch.tensor(zeros - 128).to(torch.int8)
    if ordered:
        stored[".weight_g_idx"] = torch.tensor(of_column, dtype=torch.int32)
    return stored, values


def fp8(
    w: Tensor,
    block: tuple[int, int] | None = None,
    inverse: bool = False,
    kind: torch.dtype = torch.float32,
) -> Written:
    """E4M3 with a scale for each block; None: for the whole matrix."""
    rows, columns = block or tuple(w.shape)
    grid = math.ceil(w.shape[0] / rows), math.ceil(w.shape[1] / columns)
    scales = torch.empty(grid, dtype=torch.float32)
    values, levels = torch.empty_like(w), torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale = (w[part].abs().max() / 448).to(torch.float32)
            if kind == torch.uint8:  # E8M0
                scale = torch.exp2(scale.log2().ceil())
            scales[i, j] = scale = scale if kind == torch.uint8 else scale.to(kind).float()
            levels[part] = (w[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            values[part] = levels[part].float() * scale
    stored = scales if block else scales.reshape(())
    stored = (stored.log2() + 127).to(torch.uint8) if kind == torch.uint8 else stored.to(kind)
    return {".weight": levels, ".weight_scale_inv" if inverse else ".weight_scale": stored}, values


def fp4_codes(x: Tensor) -> Tensor:
    """Returns the number of the nearest 4-bit float, and its value."""
    table = torch.tensor(FP4)
    return (x.unsqueeze(-1) - table).abs().argmin(-1)


def bytes_of(codes: Tensor) -> Tensor:
    """[..., N] -> [..., N / 2] uint8: the first of two in the lower half."""
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def nvfp4(w: Tensor, divides: bool) -> Written:
    """Groups of 16. `divides`: as in compressed-tensors, where the scale of the matrix is a divisor
    of the stored scales; otherwise as in modelopt."""
    whole = (w.abs().max() / (6 * 448)).to(torch.float32)
    parts = w.unflatten(1, (-1, 16))
    stored = (parts.abs().amax(-1) / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
    if divides:
        factor = 1 / whole
        scales = stored.float() / factor
    else:
        factor = whole
        scales = stored.float() * factor
    codes = fp4_codes(parts / scales.clamp(min=1e-12).unsqueeze(-1))
    values = (torch.tensor(FP4)[codes] * scales.unsqueeze(-1)).flatten(1)
    numbers, number = (
        (".weight_packed", ".weight_global_scale")
        if divides
        else (
            ".weight",
            ".weight_scale_2",
        )
    )
    factor = factor.reshape(1) if divides else factor
    return {numbers: bytes_of(codes.flatten(1)), ".weight_scale": stored, number: factor}, values


def mx_groups(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of 32 in the last dimension, with powers of two as scales. Returns codes [..., G, 32],
    exponents [..., G] uint8 and values [..., in]."""
    parts = w.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(parts.abs().amax(-1).clamp(min=1e-30))) - 2
    codes = fp4_codes(parts / torch.exp2(exponents).unsqueeze(-1))
    values = torch.tensor(FP4)[codes] * torch.exp2(exponents).unsqueeze(-1)
    return codes, (exponents + 127).to(torch.uint8), values.flatten(-2)


def mxfp4(w: Tensor) -> Written:
    """mxfp4-pack-quantized of compressed-tensors."""
    codes, exponents, values = mx_groups(w)
    return {".weight_packed": bytes_of(codes.flatten(-2)), ".weight_scale": exponents}, values


def gpt_oss(w: Tensor) -> Written:
    """w [E, in, out], the experts of gpt-oss."""
    codes, exponents, values = mx_groups(w.transpose(1, 2))
    return {"_blocks": bytes_of(codes), "_scales": exponents}, values.transpose(1, 2).contiguous()


def weights(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    """Returns how compressed-tensors declares the weights of a group of modules."""
    return {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": False, **more}


def compressed(form: str, declared: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(declared), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


@dataclass(frozen=True)
class Format:
    """A published format: what config.json declares, and a writer."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]
    extra: tuple[str, ...] = field(default=(".input_scale",))
    """Suffixes of other tensors that such checkpoints have for each matrix."""


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, **more}


INT4 = weights("int", 4, strategy="group", group_size=32)
FORMATS: dict[str, Format] = {
    "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "fp8-block": Format(
        {"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"},
        lambda w: fp8(w, (48, 32), inverse=True),
    ),
    "fp8-block-e8m0": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        lambda w: fp8(w, (32, 32), inverse=True, kind=torch.uint8),
    ),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda w: fp8(w, (1, w.shape[1])),
        (".input_scale_ub",),
    ),
    "ct-fp8-channel": Format(
        compressed("float-quantized", weights("float", 8, strategy="channel")),
        lambda w: fp8(w, (1, w.shape[1]), kind=torch.bfloat16),
        (".input_scale", ".k_scale"),
    ),
    "ct-fp8-block": Format(
        compressed(
            "float-quantized", weights("float", 8, strategy="block", block_structure=[48, 32])
        ),
        lambda w: fp8(w, (48, 32)),
    ),
    "ct-int8": Format(compressed("int-quantized", weights("int", 8, strategy="channel")), int8),
    "ct-int8-asymmetric": Format(
        compressed(
            "int-quantized",
            weights("int", 8, strategy="group", group_size=64, symmetric=False),
        ),
        lambda w: int8(w, 64, symmetric=False),
    ),
    "ct-w4a16": Format(compressed("pack-quantized", INT4), packed),
    "ct-w4a16-asymmetric": Format(
        compressed("pack-quantized", {**INT4, "symmetric": False}),
        lambda w: packed(w, symmetric=False),
    ),
    "ct-w4a16-ordered": Format(
        compressed("pack-quantized", {**INT4, "actorder": "group"}),
        lambda w: packed(w, ordered=True),
    ),
    "ct-w4a16-channel": Format(
        compressed("pack-quantized", weights("int", 4, strategy="channel", group_size=-1)),
        lambda w: packed(w, group=-1),
    ),
    "ct-w8a16": Format(
        compressed("pack-quantized", weights("int", 8, strategy="group", group_size=64)),
        lambda w: packed(w, bits=8, group=64),
    ),
    "ct-nvfp4": Format(
        compressed("nvfp4-pack-quantized", weights("float", 4, group_size=16)),
        lambda w: nvfp4(w, divides=True),
        (".input_global_scale",),
    ),
    "ct-mxfp4": Format(
        compressed("mxfp4-pack-quantized", weights("float", 4, group_size=32)), mxfp4
    ),
    "gptq": Format(_gptq(), gptq),
    "gptq-asymmetric-ordered": Format(
        _gptq(sym=False, desc_act=True), lambda w: gptq(w, symmetric=False, ordered=True)
    ),
    "gptq-8": Format(
        _gptq(bits=8, group_size=64), lambda w: gptq(w, bits=8, group=64, index=False)
    ),
    "gptq-3": Format(_gptq(bits=3, sym=False), lambda w: gptq(w, bits=3, symmetric=False)),
    "gptq-2": Format(
        _gptq(bits=2, group_size=-1, sym=False),
        lambda w: gptq(w, bits=2, group=-1, symmetric=False),
    ),
    "gptq-v2": Format(
        _gptq(checkpoint_format="gptq_v2", sym=False),
        lambda w: gptq(w, symmetric=False, first=False),
    ),
    "gptq-symmetric-zeros": Format(  # declares the first version, but stores the zero itself
        _gptq(checkpoint_format="gptq"), lambda w: gptq(w, first=False)
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
    "modelopt-fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w: nvfp4(w, divides=False)
    ),
}


def quantize_folder(
    folder: Path,
    form: Format,
    quantized: Callable[[str, Tensor], bool],
    out: tuple[Path, Path],
) -> None:
    """Writes two copies of a model: with the matrices that `quantized` selects in a format, and
    with their exact values."""
    whole = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        if not quantized(name, tensor):
            stored[name] = values[name] = tensor
            continue
        parts, values[name] = form.write(tensor.float())
        base = name.removesuffix(".weight")
        for suffix, part in parts.items():
            stored[base + suffix] = part.contiguous()
        for suffix in form.extra:
            stored[base + suffix] = torch.ones(1)
    config = json.loads((folder / "config.json").read_text())
    for target, tensors, more in (
        (out[0], stored, {"quantization_config": form.config}),
        (out[1], values, {}),
    ):
        target.mkdir(exist_ok=True)
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                (target / file.name).write_bytes(file.read_bytes())
        (target / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
