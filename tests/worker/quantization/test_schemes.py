"""A quantized matrix is read as the values that its format means, in whole and in parts."""

from __future__ import annotations

import zlib
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from swell.kernels.weights.quantized import Numbers
from swell.worker.checkpoint.checkpoint import HasIntegers, Index
from swell.worker.checkpoint.safetensors_files import SafetensorsCheckpoint
from swell.worker.quantization import grouped_matrix
from swell.worker.quantization.detection import find_scheme
from swell.worker.quantization.quantized_checkpoint import QuantizedCheckpoint
from tests.worker.quantization import writers

ALL = slice(None)
NAME = "model.layers.0.mlp.up_proj"
PARTS: list[Index] = [
    (ALL, ALL),
    (slice(64, 128), ALL),
    (ALL, slice(96, 192)),
    (slice(13, 90), slice(37, 150)),
    (slice(5, 6), slice(191, 192)),
    (slice(120, 120), ALL),
]


def matrix(*shape: int, seed: str = "") -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(*shape, generator=generator) * torch.rand(
        shape[0], *(1,) * (len(shape) - 1), generator=generator
    ).add(0.1)


def opened(folder: Path, form: writers.Format, stored: dict[str, Tensor]) -> QuantizedCheckpoint:
    save_file({NAME + k: t.contiguous() for k, t in stored.items()}, folder / "model.safetensors")
    scheme = find_scheme("m", {"quantization_config": form.config}, folder)
    assert scheme is not None
    return QuantizedCheckpoint(SafetensorsCheckpoint(folder), scheme)


@pytest.mark.parametrize("name", writers.FORMATS)
def test_every_part_of_a_matrix_equals_its_meaning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts begin anywhere: ranks cut matrices where groups and words do not end."""
    form = writers.FORMATS[name]
    w = matrix(128, 192, seed=name)
    stored, values = form.write(w)
    assert (values - w).abs().max() < w.abs().max() * (0.5 if name == "gptq-2" else 0.3)
    bias = torch.ones(128)
    with closing(opened(tmp_path, form, {**stored, ".bias": bias})) as checkpoint:
        assert set(checkpoint.names) == {f"{NAME}.weight", f"{NAME}.bias"}
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert tensor.shape == (128, 192)
        for block in (1 << 20, 1000):
            monkeypatch.setattr(grouped_matrix, "BLOCK_VALUES", block)
            for index in PARTS:
                assert torch.equal(tensor.read(index, torch.float32), values[index])
        read = tensor.read((3, ALL), torch.bfloat16)
        assert torch.equal(read, values[3].to(torch.bfloat16))
        assert torch.equal(checkpoint.tensor(f"{NAME}.bias").read((ALL,), torch.float32), bias)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-e8m0", "ct-w4a16", "ct-w4a16-asymmetric"])
def test_matrices_whose_borders_are_not_those_of_blocks_and_words(
    name: str, tmp_path: Path
) -> None:
    form = writers.FORMATS[name]
    rows, columns = (100, 52) if name.startswith("fp8") else (30, 96)
    if name.endswith("e8m0"):
        rows, columns = 96, 64
    stored, values = form.write(matrix(rows, columns, seed=name))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        for index in ((ALL, ALL), (slice(25, rows), slice(7, columns)), (slice(11, 29), ALL)):
            assert torch.equal(tensor.read(index, torch.float32), values[index])


def test_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    form = writers.Format({"quant_method": "mxfp4"}, writers.gpt_oss)
    stored, values = form.write(matrix(3, 96, 64))
    with closing(opened(tmp_path, form, {**stored, "_bias": torch.ones(3, 64)})) as checkpoint:
        assert set(checkpoint.names) == {NAME, f"{NAME}_bias"}
        tensor = checkpoint.tensor(NAME)
        assert tensor.shape == (3, 96, 64)
        part = slice(40, 81), slice(9, 50)
        for index in ((ALL, ALL, ALL), (slice(1, 3), *part), (2, *part)):
            assert torch.equal(tensor.read(index, torch.float32), values[index])


def test_gpt_oss_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, values = writers.gpt_oss(matrix(3, 96, 64))
    theirs = convert_moe_packed_tensors(stored["_blocks"], stored["_scales"], dtype=torch.float32)
    assert torch.equal(theirs, values)


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_blocks_of_fp8_equal_transformers(kind: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, values = writers.fp8(matrix(96, 64), (32, 32), inverse=True, kind=kind)
    theirs = Fp8Dequantize(None)._dequantize_one(
        stored[".weight"], stored[".weight_scale_inv"], torch.float32
    )
    assert torch.equal(theirs, values)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_two_keys_name_the_version_of_gptq(key: str, tmp_path: Path) -> None:
    form = writers.FORMATS["gptq-v2"]
    config = {k: v for k, v in form.config.items() if k != "checkpoint_format"}
    form = replace(form, config={**config, key: "gptq_v2"})
    stored, values = form.write(matrix(128, 192))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert torch.equal(tensor.read((ALL, ALL), torch.float32), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("index", [False, True])
def test_the_last_group_of_gptq_may_be_smaller(index: bool, bits: int, tmp_path: Path) -> None:
    form = writers.Format(
        {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": True},
        lambda w: writers.gptq(w, bits=bits, group=64, index=index),
    )
    stored, values = form.write(matrix(128, 160))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert tensor.shape == (128, 160)
        for index_of in ((ALL, ALL), (ALL, slice(60, 130))):
            assert torch.equal(tensor.read(index_of, torch.float32), values[index_of])


def of_int8(**options: Any) -> writers.Format:
    declared = writers.weights("int", 8, strategy="group", group_size=32)
    config = writers.compressed("int-quantized", declared)
    return writers.Format(config, lambda w: writers.int8(w, 32, **options))


def test_integers_of_8_bits_may_be_ordered_by_activation(tmp_path: Path) -> None:
    form = of_int8(ordered=True)
    stored, values = form.write(matrix(128, 192))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        for index in PARTS:
            assert torch.equal(tensor.read(index, torch.float32), values[index])
        assert isinstance(tensor, HasIntegers)
        assert isinstance(tensor.read_quantized((ALL, ALL)), str)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_kept_integers_have_the_values_of_the_matrix(kind: torch.dtype, tmp_path: Path) -> None:
    """The product of a zero and a float32 scale may need more bits than float32 has: then integers
    are not kept."""
    form = of_int8(symmetric=False, kind=kind)
    stored, values = form.write(matrix(128, 192))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert isinstance(tensor, HasIntegers)
        kept = tensor.read_quantized((ALL, ALL))
        assert isinstance(kept, str) == (kind == torch.float32)
        assert isinstance(kept, str) or torch.equal(kept.dequantize(torch.float32), values)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *((name, Numbers.E4M3) for name in ("fp8-tensor", "fp8-block", "fp8-block-e8m0")),
        *((name, Numbers.E4M3) for name in ("fbgemm-fp8", "ct-fp8-channel", "modelopt-fp8")),
        *((name, Numbers.E2M1) for name in ("ct-mxfp4", "ct-nvfp4", "modelopt-nvfp4")),
    ],
)
def test_kept_floats_have_the_values_of_the_matrix(
    name: str, numbers: Numbers, tmp_path: Path
) -> None:
    """Floats of 4 bits become integers if products take no floats."""
    form = writers.FORMATS[name]
    stored, values = form.write(matrix(256, 384))
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert isinstance(tensor, HasIntegers)
        for index in ((ALL, ALL), (slice(3, 200), slice(128, 256))):
            kept = tensor.read_quantized(index, frozenset(Numbers))
            assert not isinstance(kept, str) and kept.numbers is numbers
            assert torch.equal(kept.dequantize(torch.float32), values[index])
        others = tensor.read_quantized((ALL, ALL))
        assert isinstance(others, str) == (numbers is Numbers.E4M3)


def test_a_matrix_with_nan_is_not_kept(tmp_path: Path) -> None:
    """The kernels read the bits of a NaN as a number."""
    form = writers.FORMATS["fp8-block"]
    stored, _ = form.write(matrix(128, 128))
    stored[".weight"].view(torch.uint8)[5, 7] = 255
    with closing(opened(tmp_path, form, stored)) as checkpoint:
        tensor = checkpoint.tensor(f"{NAME}.weight")
        assert isinstance(tensor, HasIntegers)
        kept = tensor.read_quantized((ALL, ALL), frozenset(Numbers))
        assert kept == "has a number that is NaN"
        assert tensor.read((ALL, ALL), torch.float32)[5, 7].isnan()


def test_the_group_of_a_matrix_does_not_depend_on_the_order_of_groups(tmp_path: Path) -> None:
    """compressed-tensors' rule: an exact name comes before patterns, these are tried in
    alphabetical order, and classes come last. A wrapper puts a prefix before names."""
    groups: dict[str, tuple[str, int, int]] = {
        # target -> the module that it gets, and the bits and the group size of that
        "model.layers.0.self_attn.q_proj": ("model.layers.0.self_attn.q_proj", 8, 64),
        "re:.*attn": ("model.layers.0.self_attn.k_proj", 4, 32),
        "re:.*proj": ("model.layers.0.mlp.up_proj", 2, 16),
        "Embedding": ("model.embed_tokens", 8, 16),
        "Linear": ("lm_head", 4, 64),
    }
    stored, values, weights = {}, {}, {}
    for target, (module, bits, size) in groups.items():
        weights[target] = writers.weights("int", bits, group_size=size)
        parts, values[module] = writers.packed(matrix(64, 128, seed=module), bits=bits, group=size)
        stored |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
    for prefix in ("", "language_model."):
        folder = tmp_path / f"of{prefix}"
        folder.mkdir()
        save_file({prefix + k: part for k, part in stored.items()}, folder / "model.safetensors")
        for order in permutations(groups):
            declared = {
                f"group_{i}": {"targets": [target], "weights": weights[target]}
                for i, target in enumerate(order)
            }
            config = writers.compressed("pack-quantized", {}, config_groups=declared)
            scheme = find_scheme("m", {"quantization_config": config}, folder)
            assert scheme is not None
            with closing(QuantizedCheckpoint(SafetensorsCheckpoint(folder), scheme)) as checkpoint:
                for module, expected in values.items():
                    tensor = checkpoint.tensor(f"{prefix}{module}.weight")
                    assert torch.equal(tensor.read((ALL, ALL), torch.float32), expected), order
