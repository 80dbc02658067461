"""A config is derived from the metadata and the tensors of a file, and a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swell.configs.files.gguf.architectures import model_config
from swell.configs.files.gguf.header import read_header
from swell.configs.files.gguf.tensor_names import sources
from swell.configs.files.gguf.tokenizer import read_vocabulary
from swell.configs.files.gguf.unpacked import unpacked
from swell.configs.section import ConfigError
from tests.support.gguf.files import write_gguf
from tests.support.gguf.small import ARCHITECTURES, small_model


def config_of(folder: Path, architecture: str, matrices: str) -> dict[str, Any]:
    file = read_header(write_gguf(folder / "m.gguf", *small_model(architecture, matrices)))
    return model_config(file, read_vocabulary(file))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gemma_is_not_served_in_float16(architecture: str, tmp_path: Path) -> None:
    """The activations of Gemma exceed the range of float16."""
    expected = "bfloat16" if architecture.startswith("gemma") else "float16"
    assert config_of(tmp_path, architecture, "F16")["dtype"] == expected
    assert config_of(tmp_path, architecture, "F32")["dtype"] == "float32"
    assert config_of(tmp_path, architecture, "BF16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("vectors", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_gemmas_norms_have_one_added_in_every_type(
    architecture: str, vectors: str, tmp_path: Path
) -> None:
    model = small_model(architecture, vectors=vectors)
    found = sources(read_header(write_gguf(tmp_path / "m.gguf", *model)))
    for name, source in found.items():
        is_gemma_norm = architecture.startswith("gemma") and "norm" in name
        assert source.added == (1.0 if is_gemma_norm else 0.0), name


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the unpacked folders away from those of other runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def refusal(folder: Path, architecture: str, changes: dict[str, Any]) -> str:
    metadata, tensors = small_model(architecture)
    own = {key.replace("ARCH", architecture): value for key, value in changes.items()}
    path = write_gguf(folder / "m.gguf", {**metadata, **own}, tensors)
    with pytest.raises(ConfigError) as found:
        unpacked(path)
    text = str(found.value)
    assert str(path) in text and "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_small_model_of_each_architecture_is_unpacked(
    architecture: str, tmp_path: Path, private_tmp: None
) -> None:
    folder = unpacked(write_gguf(tmp_path / "m.gguf", *small_model(architecture)))
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("count", [1, 3, 2**31 - 1])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_number_of_layers_that_the_tensors_contradict_is_refused(
    architecture: str, count: int, tmp_path: Path, private_tmp: None
) -> None:
    text = refusal(tmp_path, architecture, {"ARCH.block_count": count})
    assert f"block_count={count}, and its tensors are those of 2 layers" in text


def test_layers_are_numbered_without_a_gap(tmp_path: Path, private_tmp: None) -> None:
    metadata, tensors = small_model("llama")
    renamed = {name.replace("blk.1.", "blk.7."): tensor for name, tensor in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, renamed)
    with pytest.raises(ConfigError, match="are not numbered from 0 to 1"):
        unpacked(path)


@pytest.mark.parametrize("count", [1, 5, 2**31 - 1])
def test_a_number_of_experts_that_the_tensors_contradict_is_refused(
    count: int, tmp_path: Path, private_tmp: None
) -> None:
    text = refusal(tmp_path, "qwen3moe", {"ARCH.expert_count": count})
    assert f"has 4 experts, and qwen3moe.expert_count={count}" in text


def test_experts_beyond_the_limit_are_refused(tmp_path: Path, private_tmp: None) -> None:
    """A file with holes has any number of experts."""
    metadata, tensors = small_model("qwen3moe")
    experts = 2**30
    several = {
        name: (kind, (experts, 1, 1) if "exps" in name else shape, b"" if "exps" in name else data)
        for name, (kind, shape, data) in tensors.items()
    }
    path = write_gguf(tmp_path / "m.gguf", {**metadata, "qwen3moe.expert_count": experts}, several)
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ConfigError, match="more than 524288 matrices"):
        unpacked(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"general.architecture": ["llama"]}, "the architecture ['llama'] is not supported"),
        ({"general.architecture": "x" * 10**6}, "is not supported"),
        ({"tokenizer.ggml.model": ["llama"]}, "the tokenizer model ['llama'] is not supported"),
        ({"general.alignment": [32]}, "general.alignment=[32] is not a power of two"),
        ({"general.alignment": 32.0}, "general.alignment=32.0 is not a power of two"),
        ({"ARCH.rope.freq_base": 1e39}, "rope.freq_base=1e+39 is not a positive number"),
        ({"ARCH.rope.freq_base": 3.4028234663852886e38}, "is not a positive number"),
        ({"ARCH.attention.layer_norm_rms_epsilon": float("nan")}, "=nan is not a positive number"),
        ({"ARCH.context_length": list(range(2**16))}, "differs between layers"),
        ({"ARCH.context_length": ["x" * 10**6]}, "is not a positive integer"),
        ({"ARCH.attention.sliding_window": ["x"]}, "is not a positive integer"),
        ({"general.sampling.temp": float("nan")}, "general.sampling.temp=nan is not a number"),
        ({"general.sampling.top_k": [1]}, "general.sampling.top_k=[1] is not a number"),
        ({"a\nb": b"\x4d\0\0\0"}, "'a\\nb' has the unknown type 77"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_metadata_are_refused_in_one_line(
    changes: dict[str, Any], text: str, tmp_path: Path, private_tmp: None
) -> None:
    architecture = "phi3" if "ARCH.attention.sliding_window" in changes else "llama"
    assert text in refusal(tmp_path, architecture, changes)


def changed(folder: Path, architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    metadata, tensors = small_model(architecture)
    own = {f"{architecture}.{key}": value for key, value in changes.items()}
    file = read_header(write_gguf(folder / "m.gguf", {**metadata, **own}, tensors))
    return model_config(file, read_vocabulary(file))


@pytest.mark.parametrize(("architecture", "default"), [("gemma2", 2), ("gemma3", 6)])
def test_the_period_of_windows_is_read(architecture: str, default: int, tmp_path: Path) -> None:
    key = "attention.sliding_window_pattern"
    kinds = {
        period: changed(tmp_path, architecture, {key: period})["layer_types"]
        for period in (1, 2, default)
    }
    assert kinds[1] == ["full_attention"] * 2
    assert kinds[2] == ["sliding_attention", "full_attention"]
    assert kinds[default] == changed(tmp_path, architecture, {})["layer_types"]


@pytest.mark.parametrize(("stated", "expected"), [({}, None), (0.0, None), (20.0, 20.0)])
def test_the_cap_of_the_logits_of_gemma_3_is_read(
    stated: Any, expected: float | None, tmp_path: Path
) -> None:
    changes = {"final_logit_softcapping": stated} if stated != {} else {}
    assert changed(tmp_path, "gemma3", changes)["final_logit_softcapping"] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"ARCH.attention.causal": False},
        {"ARCH.rope.dimension_count_swa": 2},
        {"ARCH.rope.scaling.attn_factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_value_that_would_change_answers_is_refused(
    architecture: str, changes: dict[str, Any], tmp_path: Path, private_tmp: None
) -> None:
    [(key, value)] = changes.items()
    expected = f"{key.replace('ARCH', architecture)}={value} is not supported"
    assert expected in refusal(tmp_path, architecture, changes)


def test_another_base_of_the_windows_of_gemma_2_is_refused(
    tmp_path: Path, private_tmp: None
) -> None:
    text = refusal(tmp_path, "gemma2", {"ARCH.rope.freq_base_swa": 50.0})
    assert "gemma2.rope.freq_base_swa=50.0 is not supported" in text
