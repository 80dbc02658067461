"""Stored tensors that do not belong together are refused in one line that names the matrix. Any
other error would end an engine that gets new weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swell.configs.schema import ModelConfig
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.packed_weight import Packing, named_matrices
from swell.worker.layers.weight_shard import ALL, WeightShard
from swell.worker.loader import LoadShare, load_weight_shards
from swell.worker.quantization.grouped_matrix import GroupedMatrix
from swell.worker.quantization.loaded_matrices import QuantizedMatrices
from tests.worker.quantization import writers
from tests.worker.quantization.test_schemes import NAME, matrix

ROWS, COLUMNS = 128, 192
GPT_OSS = writers.Format({"quant_method": "mxfp4"}, writers.gpt_oss, ())
FORMATS = {**writers.FORMATS, "gpt-oss": GPT_OSS}
INDICES = {
    "gptq-asymmetric-ordered": ".g_idx",
    "ct-w4a16-ordered": ".weight_g_idx",
}


def stored(name: str) -> dict[str, Tensor]:
    shape = (3, 96, 64) if name == "gpt-oss" else (ROWS, COLUMNS)
    return FORMATS[name].write(matrix(*shape, seed=name))[0]


def damages(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "another type", tensor.to(torch.bool)
    if not tensor.is_floating_point() and tensor.element_size() == 4 and tensor.dim() == 2:
        yield "wider integers", tensor.long()
    yield "empty", tensor.new_empty((0,) * max(1, tensor.dim()))
    if tensor.numel() == 1:
        yield "several", tensor.reshape(1).expand(3)
        return
    if tensor.shape[1:] != (1,):  # otherwise these are scales of the matrix or of each row, too
        yield "no dimension", tensor.flatten()[0]
        yield "flat", tensor.flatten() if tensor.dim() > 1 else tensor.unsqueeze(0)
    yield "one more dimension", tensor.unsqueeze(0)
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield f"without the last of dimension {dim}", tensor.narrow(dim, 0, size - 1)
            yield f"half of dimension {dim}", tensor.narrow(dim, 0, size // 2)
            yield f"none of dimension {dim}", tensor.narrow(dim, 0, 0)
        yield (
            f"twice in dimension {dim}",
            torch.cat([tensor.byte(), tensor.byte()], dim).to(tensor.dtype),
        )


def save(folder: Path, form: writers.Format, parts: dict[str, Tensor]) -> None:
    tensors = {NAME + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": form.config}))


def read(folder: Path, form: writers.Format, parts: dict[str, Tensor], keep: bool) -> Tensor:
    """Loads a matrix as a worker does."""
    save(folder, form, parts)
    if form is GPT_OSS:
        target = torch.zeros(3, 96, 64)
        shard = WeightShard(NAME, target, (ALL, ALL, ALL), (3, 96, 64))
        load_weight_shards(lambda _: [shard], ModelConfig(path=str(folder)))
        return target
    model = nn.Sequential(ReplicatedLinear(COLUMNS, ROWS, bias=False))
    target = model[0].weight.data
    shard = WeightShard(f"{NAME}.weight", target, (ALL, ALL), (ROWS, COLUMNS))
    packing, device = Packing(keeps_integers=keep), torch.device("cpu")
    matrices = QuantizedMatrices(named_matrices(model), packing, device)
    shares: list[LoadShare] = []
    config = ModelConfig(path=str(folder))
    load_weight_shards(lambda _: [shard], config, shares.append, matrices)
    assert shares[-1] == (shard.target.nbytes, shard.target.nbytes, 1, 1)
    return target


def refuse(folder: Path, form: writers.Format, parts: dict[str, Tensor], keep: bool) -> str:
    """Returns '' if the matrix is refused in one line that names it, otherwise what happens."""
    try:
        read(folder, form, parts, keep)
    except ValueError as error:
        text = str(error)
        return "" if NAME in text and "\n" not in text else f"ValueError: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_tensors_are_refused(name: str, keep: bool, tmp_path: Path) -> None:
    form, parts = FORMATS[name], stored(name)
    read(tmp_path, form, parts, keep)
    found = {
        (suffix, damage): refuse(tmp_path, form, {**parts, suffix: damaged}, keep)
        for suffix, tensor in parts.items()
        for damage, damaged in damages(tensor)
    }
    assert len(found) >= 8
    assert {case: what for case, what in found.items() if what} == {}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number", [-2, -1, 6, 99, 2**31 - 1])
@pytest.mark.parametrize("name", INDICES)
def test_groups_that_a_matrix_lacks_are_refused(
    name: str, number: int, keep: bool, tmp_path: Path
) -> None:
    parts = stored(name)
    groups = parts[INDICES[name]].clone()
    groups[100] = number
    parts[INDICES[name]] = groups
    assert refuse(tmp_path, FORMATS[name], parts, keep) == ""


def test_a_shape_that_the_numbers_do_not_have(tmp_path: Path) -> None:
    parts = stored("ct-w4a16")
    for shape in ([ROWS, COLUMNS + 1], [ROWS, -1], [-1, COLUMNS], [2**62, 2**62], [0, 0]):
        parts[".weight_shape"] = torch.tensor(shape)
        assert refuse(tmp_path, FORMATS["ct-w4a16"], parts, keep=False) == ""


@pytest.mark.parametrize("error", [RuntimeError, IndexError, TypeError, ValueError, MemoryError])
@pytest.mark.parametrize("method", ["find_shape", "levels", "grid", "groups"])
def test_any_other_error_of_reading_is_a_refusal(
    method: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swell.worker.quantization.gptq import GptqMatrix

    def fail(*_: object) -> None:
        raise error("of several\nlines")

    assert issubclass(GptqMatrix, GroupedMatrix)
    monkeypatch.setattr(GptqMatrix, method, fail)
    assert refuse(tmp_path, FORMATS["gptq"], stored("gptq"), keep=False) == ""


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_not_finite_is_refused(
    name: str, number: float, keep: bool, tmp_path: Path
) -> None:
    parts, found = stored(name), {}
    for suffix, tensor in parts.items():
        if "scale" in suffix and (damaged := with_number(tensor, number)) is not None:
            found[suffix] = refuse(tmp_path, FORMATS[name], {**parts, suffix: damaged}, keep)
    assert {suffix: what for suffix, what in found.items() if what} == {}


def with_number(scales: Tensor, number: float) -> Tensor | None:
    """Returns the scales with the last one replaced; None: their type cannot represent it."""
    damaged = scales.clone()
    last = damaged.view(-1)[-1:]
    if scales.dtype == torch.uint8:  # E8M0
        last.fill_(255)
    else:
        last.copy_(torch.tensor([number]))
    is_plain = scales.dtype != torch.uint8 and bool(last.float().isfinite().all())
    return None if is_plain or (scales.dtype == torch.uint8 and number == number) else damaged


@pytest.mark.parametrize("name", writers.FORMATS)
def test_negative_scales_are_computed(name: str, tmp_path: Path) -> None:
    parts = stored(name)
    signed = {
        suffix: (-tensor.float()).to(tensor.dtype)
        for suffix, tensor in parts.items()
        if "scale" in suffix and tensor.dtype != torch.uint8
    }
    found = []
    for each in (parts, {**parts, **signed}):
        save(tmp_path, writers.FORMATS[name], each)
        found.append(torch.zeros(ROWS, COLUMNS))
        shard = WeightShard(f"{NAME}.weight", found[-1], (ALL, ALL), (ROWS, COLUMNS))
        load_weight_shards(lambda _, shard=shard: [shard], ModelConfig(path=str(tmp_path)))
    assert found[0].any()
    assert torch.equal(found[1], found[0] * (-1) ** len(signed))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_of_a_matrix_is_needed(name: str, keep: bool, tmp_path: Path) -> None:
    """Without one of them, the others would mean other numbers."""
    form, parts = FORMATS[name], stored(name)
    needed = [suffix for suffix in parts if suffix != ".g_idx" or name in INDICES]
    found = {
        missing: refuse(
            tmp_path, form, {key: part for key, part in parts.items() if key != missing}, keep
        )
        for missing in needed
    }
    assert {missing: what for missing, what in found.items() if what} == {}
