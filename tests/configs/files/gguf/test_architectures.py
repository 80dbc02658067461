"""Values that a file omits follow from its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swell.configs.files.gguf.architectures import model_config
from swell.configs.files.gguf.header import read_header
from swell.configs.files.gguf.tensor_names import sources
from swell.configs.files.gguf.tokenizer import read_vocabulary
from tests.support.gguf_files import write_gguf
from tests.support.gguf_small import ARCHITECTURES, small_model


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
