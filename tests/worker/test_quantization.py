"""A quantized checkpoint is refused; the error has the key, its value and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.loader import load_weights
from swell.worker.models import build_model
from tests.worker import tiny_models

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
@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ("quantization_config", {"quant_algo": "NVFP4"}, "NVFP4"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization", {"bits": 4, "group_size": 64}, "4 bits"),
    ],
)
def test_configs_with_quantization(
    folder: Path, backend: str, key: str, value: dict[str, Any], method: str
) -> None:
    change_config(folder, **{key: value})
    text = refusal(folder, backend)
    assert f"{method!r}" in text or method in text
    for part in (key, json.dumps(value)[:40], "not supported", "bfloat16"):
        assert part in text


def test_a_config_inside_the_config(tmp_path: Path) -> None:
    """A quantization config inside a nested config is found: models of several parts have a config
    for each."""
    tiny_models.make(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    text = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "awq"}}
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert "'awq'" in refusal(tmp_path, "transformers")


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8"),
    ],
)
def test_files_next_to_the_config_are_read(
    folder: Path, name: str, content: dict[str, Any], method: str
) -> None:
    (folder / name).write_text(json.dumps(content))
    text = refusal(folder)
    assert method in text
    assert name in text


def test_neutral_values_mean_no_quantization(folder: Path) -> None:
    change_config(folder, quantization_config=None, compression_config={})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
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
