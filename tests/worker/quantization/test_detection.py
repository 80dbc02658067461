"""How a checkpoint is quantized is found; what is not supported is refused with its key and value,
and with what to do."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.checkpoint.safetensors_files import SafetensorsCheckpoint
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.loader import load_weights, open_checkpoint
from swell.worker.models import build_model
from swell.worker.quantization.detection import find_scheme
from swell.worker.quantization.quantized_checkpoint import QuantizedCheckpoint
from tests.worker import tiny_models
from tests.worker.quantization import declarations, writers

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.make(tmp_path, "llama", num_hidden_layers=2)
    return tmp_path


def load(folder: Path, backend: str) -> Any:
    config = ModelConfig(path=str(folder), backend=backend)
    mesh = Mesh.build(ParallelConfig(), 0)
    model: Any = build_model(config, load_config(config), mesh, "cpu", torch.float32)
    load_weights(model, config)
    return model


def refusal(folder: Path, backend: str = "native") -> str:
    with pytest.raises(ValueError) as refused:
        load(folder, backend)
    text = str(refused.value)
    assert "\n" not in text
    return text


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("key", "value", "method"), declarations.METHODS)
def test_methods_that_are_not_supported(
    folder: Path, backend: str, key: str, value: dict[str, Any], method: str
) -> None:
    change_config(folder, **{key: value})
    text = refusal(folder, backend)
    for part in (method, key, json.dumps(value)[:40], "not supported", "bfloat16", "gptq"):
        assert part in text


@pytest.mark.parametrize(("config", "value"), declarations.VALUES)
def test_values_that_are_not_supported(folder: Path, config: dict[str, Any], value: str) -> None:
    """The loader refuses them before it reads the weights."""
    change_config(folder, quantization_config=config)
    (folder / WEIGHTS).unlink()
    text = refusal(folder)
    for part in (config["quant_method"], "quantization_config", value, "bfloat16"):
        assert part in text


def test_a_config_inside_the_config(tmp_path: Path) -> None:
    """A quantization config inside a nested config is found: models of several parts have a config
    for each."""
    tiny_models.make(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    text = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "hqq"}}
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    refused = refusal(tmp_path, "transformers")
    assert "'hqq'" in refused and "text_config.quantization_config" in refused


@pytest.mark.parametrize(("name", "content", "method"), declarations.FILES)
def test_files_next_to_the_config_are_read(
    folder: Path, name: str, content: dict[str, Any], method: str
) -> None:
    (folder / name).write_text(json.dumps(content))
    text = refusal(folder)
    assert method in text
    assert name in text


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            "modelopt-nvfp4",
        ),
    ],
)
def test_a_file_next_to_the_config_declares_the_method(
    folder: Path, tmp_path: Path, name: str, content: dict[str, Any], form: str
) -> None:
    tensors = load_file(folder / WEIGHTS)
    stored, values = writers.FORMATS[form].write(tensors[UP])
    others = {key: tensor for key, tensor in tensors.items() if key != UP}
    parts = {UP.removesuffix(".weight") + suffix: part for suffix, part in stored.items()}
    save_file({k: t.contiguous() for k, t in {**others, **parts}.items()}, folder / WEIGHTS)
    (folder / name).write_text(json.dumps(content))
    model = load(folder, "transformers")
    assert torch.equal(model.base.layers[1].mlp.up_proj.weight, values)


def test_missing_and_unfit_parts_of_a_matrix_are_named(folder: Path) -> None:
    whole = load_file(folder / WEIGHTS)
    change_config(folder, quantization_config=writers.FORMATS["gptq"].config)
    stored, _ = writers.FORMATS["gptq"].write(whole[UP])
    base = UP.removesuffix(".weight")
    for changed, words in (
        ({".scales": None}, ["'.scales'", ".qweight"]),
        ({".qweight": None}, ["'.qweight'"]),
        ({".scales": stored[".scales"][:, :100].contiguous()}, ["'.scales'", "shape [4, 100]"]),
        ({".qweight": stored[".qweight"].to(torch.int64)}, ["I64"]),
    ):
        parts = {**stored, **changed}
        tensors = {base + k: t.contiguous() for k, t in parts.items() if t is not None}
        others = {key: tensor for key, tensor in whole.items() if key != UP}
        save_file({**others, **tensors}, folder / WEIGHTS)
        text = refusal(folder)
        for part in (UP, "gptq", WEIGHTS, *words):
            assert part in text


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("layout", declarations.CACHES)
def test_scales_of_a_cache_are_not_loaded(
    layout: str, backend: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is that of the other tensors. One line of the log says what the checkpoint
    declares, or stores, for a quantized cache."""
    cache = declarations.CACHES[layout]
    tensors = load_file(folder / WEIGHTS)
    if cache.form:
        stored, _ = writers.FORMATS[cache.form].write(tensors.pop(UP))
        tensors |= {UP.removesuffix(".weight") + suffix: part for suffix, part in stored.items()}
    if cache.config:
        form = writers.FORMATS[cache.form].config if cache.form else {}
        change_config(folder, quantization_config={**form, **cache.config})
    if cache.file:
        (folder / "hf_quant_config.json").write_text(json.dumps(cache.file))
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / WEIGHTS)
    expected = load(folder, backend).state_dict()
    for layer in range(2):
        for name, shape in cache.scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full(shape, 0.5)
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / WEIGHTS)
    with caplog.at_level(logging.INFO, "swell"):
        caplog.clear()  # another test may have chosen this level before
        found = load(folder, backend).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    lines = [one.message for one in caplog.records if one.name.startswith("swell")]
    if cache.form:
        assert lines.pop(0).startswith("the checkpoint is quantized (")
    (line,) = lines
    for part in (cache.noted, "cache.dtype=int8 or fp8", "docs/tune/kv-cache.md"):
        assert part in line


def test_names_without_the_tensors_of_a_cache(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = {name for cache in declarations.CACHES.values() for name in cache.scales}
    others = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names}
    save_file({**tensors, **others}, folder / WEIGHTS)
    change_config(folder, quantization_config=declarations.CACHES["AutoFP8"].config)
    with closing(open_checkpoint(ModelConfig(path=str(folder)))) as stored:
        assert set(stored.names) == set(tensors)


def test_neutral_values_mean_no_quantization(folder: Path) -> None:
    change_config(folder, quantization_config=None, compression_config={})
    values = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": values}))
    config = ModelConfig(path=str(folder))
    assert load_config(config).model_type == "llama"


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int32, "I32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.bool, "BOOL"),
    ],
)
def test_types_that_need_scales_are_refused(
    folder: Path, backend: str, stored: torch.dtype, name: str
) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, UP: tensors[UP].to(stored)}, folder / WEIGHTS)
    text = refusal(folder, backend)
    for part in (UP, name, WEIGHTS, "bfloat16"):
        assert part in text


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_plain_number_types_are_loaded(folder: Path, stored: torch.dtype) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, UP: tensors[UP].to(stored)}, folder / WEIGHTS)
    model = load(folder, "transformers")
    got = model.base.layers[1].mlp.up_proj.weight
    assert torch.equal(got, tensors[UP].to(stored).float())


def test_factors_of_the_inputs_of_a_matrix_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(32, 32), "a.pre_quant_scale": torch.ones(32)}
    save_file(tensors, tmp_path / WEIGHTS)
    form = writers.FORMATS["modelopt-nvfp4"]
    scheme = find_scheme("m", {"quantization_config": form.config}, tmp_path)
    assert scheme is not None
    with pytest.raises(ValueError, match=r"'a\.pre_quant_scale' has factors"):
        QuantizedCheckpoint(SafetensorsCheckpoint(tmp_path), scheme)
