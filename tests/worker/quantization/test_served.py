"""A quantized model is served with the tokens and log probabilities of its dequantized copy."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM
from swell.configs.schema import ModelConfig
from swell.configs.section import ConfigError
from swell.worker.loader import open_checkpoint
from tests.support.device import on_device
from tests.worker.quantization import declarations, writers
from tests.worker.quantization.copies import answers, answers_of, copies

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("name", writers.FORMATS)
def test_every_format(name: str, backend: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name])
    settings = {"model.backend": backend}
    assert answers(quantized, **settings) == answers(plain, **settings)


@pytest.mark.parametrize("name", ["fp8-block", "ct-w4a16-asymmetric", "gptq", "awq", "ct-nvfp4"])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_ranks_and_stages(name: str, axis: str, backend: str, tmp_path: Path) -> None:
    """Two ranks cut rows and columns: 192 inputs are 6 groups of 32, and 96 are 3 of them."""
    quantized, plain = copies(tmp_path, writers.FORMATS[name])
    settings = {"model.backend": backend, f"parallel.{axis}": 2}
    assert answers(quantized, **settings) == answers(plain, **settings)


@pytest.mark.parametrize("name", ["fp8-block", "gptq-asymmetric-ordered", "ct-w4a16-channel"])
def test_cuts_within_groups(name: str, tmp_path: Path) -> None:
    """80 inputs of a rank end within a group of 32, or within a block of 48 rows."""
    quantized, plain = copies(tmp_path, writers.FORMATS[name], intermediate_size=160)
    assert answers(quantized, **{"parallel.tensor": 2}) == answers(plain, **{"parallel.tensor": 2})


@pytest.mark.parametrize("name", ["fp8-block", "ct-w4a16", "gptq", "awq", "modelopt-nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "phi3"])
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_experts_and_fused_matrices(name: str, family: str, backend: str, tmp_path: Path) -> None:
    """qwen3_moe and mixtral store each expert separately, phi3 fuses projections."""
    quantized, plain = copies(tmp_path, writers.FORMATS[name], family)
    settings = {"model.backend": backend}
    assert answers(quantized, **settings) == answers(plain, **settings)


def test_gpt_oss(tmp_path: Path) -> None:
    """The architecture is not served, but its checkpoint has the parameters of the plain one."""
    form = writers.Format({"quant_method": "mxfp4"}, writers.gpt_oss, ())
    quantized, plain = copies(
        tmp_path, form, "gpt_oss", lambda name, tensor: tensor.dim() == 3, intermediate_size=64
    )
    names = load_file(quantized / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks" in names
    expected = load_file(plain / "model.safetensors")
    with closing(open_checkpoint(ModelConfig(path=str(quantized)))) as checkpoint:
        assert set(checkpoint.names) == set(expected)
        for name, tensor in expected.items():
            stored = checkpoint.tensor(name)
            assert stored.shape == tensor.shape
            assert torch.equal(stored.read((slice(None),) * tensor.dim(), torch.float32), tensor)
    with pytest.raises(ConfigError, match="its attention has the arguments s_aux"):
        answers(quantized)


def test_a_head_and_an_embedding_are_quantized_too(tmp_path: Path) -> None:
    quantized, plain = copies(
        tmp_path, writers.FORMATS["ct-int8"], "llama", lambda name, tensor: tensor.dim() == 2
    )
    assert "lm_head.weight_scale" in load_file(quantized / "model.safetensors")
    assert answers(quantized) == answers(plain)


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
def test_stored_scales_of_a_cache_change_no_answer(dtype: str, tmp_path: Path) -> None:
    """There is a scale for each KV head, and each of two ranks has one head."""
    form = writers.FORMATS["ct-fp8-channel"]
    quantized, plain = copies(tmp_path, form)
    config = json.loads((quantized / "config.json").read_text())
    scheme = {**declarations.SCHEME, "strategy": "attn_head"}
    config["quantization_config"] = {**form.config, "kv_cache_scheme": scheme}
    (quantized / "config.json").write_text(json.dumps(config))
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.full((heads, 1, 1), 0.01)
        for layer in range(2)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    file = quantized / "model.safetensors"
    save_file({**load_file(file), **scales}, file)
    settings = {"parallel.tensor": 2, "cache.dtype": dtype}
    assert answers(quantized, **settings) == answers(plain, **settings)


def test_matrices_of_one_layer_in_several_formats(tmp_path: Path) -> None:
    """A config with groups, as mixed-precision models have them: each matrix has its own scheme,
    and some are not quantized."""
    formats = {
        "q_proj.weight": ("ct-w4a16-asymmetric", {"group_size": 32, "num_bits": 4}),
        "k_proj.weight": ("ct-w8a16", {"group_size": 64, "num_bits": 8}),
        "down_proj.weight": ("ct-fp8-channel", {"num_bits": 8}),
    }
    quantized, plain = copies(tmp_path, writers.FORMATS["ct-w4a16"], quantized=lambda *_: False)
    stored, values = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = values[name] = tensor
        for suffix, (form, _) in formats.items():
            if name.endswith(suffix):
                parts, values[name] = writers.FORMATS[form].write(tensor)
                del stored[name]
                stored |= {name.removesuffix(".weight") + k: t for k, t in parts.items()}
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["format"] = "mixed-precision"
    config["quantization_config"]["config_groups"] = {
        f"group_{i}": {"targets": [rf"re:.*{suffix.removesuffix('.weight')}$"], "weights": weights}
        for i, (suffix, (_, weights)) in enumerate(formats.items())
    }
    config["quantization_config"]["ignore"] = ["re:.*gate_proj", "lm_head"]
    (quantized / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(whole, quantized / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    for backend in ("native", "transformers"):
        settings = {"model.backend": backend}
        assert answers(quantized, **settings) == answers(plain, **settings)


@pytest.mark.parametrize("name", ["gptq", "fp8-block"])
def test_quantized_weights_replace_those_of_a_running_model(name: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name])
    other = tmp_path / "other"
    other.mkdir()
    copies(other, writers.FORMATS[name])
    tensors = load_file(other / "source" / "model.safetensors")
    save_file({n: t + 0.1 for n, t in tensors.items()}, other / "source" / "model.safetensors")
    expected = answers(plain)
    settings = on_device({"cache.memory_bytes": 2_000_000, "model.dtype": "float32"})
    with LLM(str(other / "source"), **settings) as llm:
        assert answers_of(llm) != expected
        llm.update_weights(str(quantized))
        assert answers_of(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert answers_of(llm) == expected


def test_weights_are_rounded_once(tmp_path: Path) -> None:
    """In bfloat16, the served values are the exact ones, rounded."""
    quantized, plain = copies(tmp_path, writers.FORMATS["gptq"])
    tensors = load_file(plain / "model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(rounded, plain / "model.safetensors")
    settings = {"model.dtype": "bfloat16"}
    assert answers(quantized, **settings) == answers(plain, **settings)
