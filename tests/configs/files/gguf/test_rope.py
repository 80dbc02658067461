"""The rotary embedding of a file is that of the model from which it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swell.configs.files.gguf.header import read_header
from swell.configs.files.gguf.metadata import Metadata
from swell.configs.files.gguf.rope import rope_parameters
from swell.configs.section import ConfigError
from tests.support.gguf.files import write_gguf

HEAD = 128
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parameters(
    folder: Path, metadata: dict[str, Any], tensors: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    written = {
        name: ("F32", (len(numbers),), np.asarray(numbers, "<f4").tobytes())
        for name, numbers in (tensors or {}).items()
    }
    own = {f"llama.{key}": value for key, value in metadata.items()}
    file = read_header(write_gguf(folder / "m.gguf", own, written))
    return rope_parameters(Metadata(file, "llama"), HEAD)


def llama_3_factors(**changes: Any) -> list[float]:
    """Returns by how much transformers divides each frequency, as llama.cpp's converter does."""
    rope = {**LLAMA_3, **changes}
    config = LlamaConfig(
        hidden_size=HEAD, num_attention_heads=1, head_dim=HEAD, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, HEAD, 2) / HEAD)
    return [float(number) for number in plain / scaled]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_parameters_of_llama_3_follow_from_its_factors(tmp_path: Path, factor: float) -> None:
    found = parameters(
        tmp_path,
        {"rope.freq_base": 500000.0},
        {"rope_freqs.weight": llama_3_factors(factor=factor)},
    )
    assert found.pop("factor") == pytest.approx(factor, rel=1e-6)
    assert found == {key: value for key, value in LLAMA_3.items() if key != "factor"}


def test_factors_of_other_parameters_are_refused(tmp_path: Path) -> None:
    base = {"rope.freq_base": 500000.0}
    for changes in ({"high_freq_factor": 8.0}, {"original_max_position_embeddings": 4096}):
        with pytest.raises(ConfigError, match="are not those of Llama 3's rotary embedding"):
            parameters(tmp_path, base, {"rope_freqs.weight": llama_3_factors(**changes)})
    with pytest.raises(ConfigError, match="are not those of Llama 3's rotary embedding"):
        parameters(tmp_path, base, {"rope_freqs.weight": [1.0] * 7})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 1.0, "rope.scaling.attn_factor": 1.0}, {"rope_type": "default"}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        ),
    ],
    ids=lambda value: json.dumps(value),
)
def test_scaling_is_read_from_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = parameters(tmp_path, {"rope.freq_base": 1e6, **metadata})
    assert found == {"rope_theta": 1e6, **expected}


def test_factors_of_a_long_context_are_read_from_two_tensors(tmp_path: Path) -> None:
    short, long = [1.0 + k / 64 for k in range(64)], [2.0 + k for k in range(64)]
    metadata = {
        "context_length": 131072,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.25,
    }
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    assert parameters(tmp_path, metadata, tensors) == {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
        "attention_factor": 1.25,
    }


def test_factors_in_another_type_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {}, {"rope_freqs.weight": ("F16", (64,), bytes(128))})
    with pytest.raises(ConfigError, match="has the type F16"):
        rope_parameters(Metadata(read_header(file), "llama"), HEAD)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), 3.4028234663852886e38])
@pytest.mark.parametrize("at", [0, 40, -1])
def test_factors_that_are_not_positive_numbers_are_refused(
    tmp_path: Path, wrong: float, at: int
) -> None:
    factors = llama_3_factors()
    factors[at] = wrong
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight' has the number"):
        parameters(tmp_path, {"rope.freq_base": 500000.0}, {"rope_freqs.weight": factors})


def test_factors_are_counted_before_they_are_compared(tmp_path: Path) -> None:
    """A head of this size would have 1 073 741 823 factors."""
    tensor = {"rope_freqs.weight": ("F32", (1,), np.ones(1, "<f4").tobytes())}
    file = read_header(write_gguf(tmp_path / "m.gguf", {}, tensor))
    with pytest.raises(ConfigError, match="are not those of Llama 3's rotary embedding"):
        rope_parameters(Metadata(file, "llama"), 2**31 - 1)
