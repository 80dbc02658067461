"""A head that config.json ties to the embedding: the stored tensors decide, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.worker import tiny_models
from tests.worker.models.test_models import check

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def store(folder: Path, **changes: torch.Tensor | None) -> Any:
    """Changes the stored tensors; returns the model that transformers loads from them."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({k: t for k, t in tensors.items() if t is not None}, folder / WEIGHTS)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.make(tmp_path, "llama-tied")
    return tmp_path


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_different_stored_head_is_used(
    folder: Path, backend: str, tensor: int, pipeline: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(tiny_models.VOCAB, 128, generator=generator) * 0.2
    oracle = store(folder, **{HEAD: head})
    assert torch.equal(oracle.lm_head.weight, head)
    check(folder, oracle, tensor, pipeline, backend)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_head_stored_equal_to_the_embedding_is_tied(folder: Path, backend: str) -> None:
    same = load_file(folder / WEIGHTS)[EMBEDDING]
    check(folder, store(folder, **{HEAD: same.clone()}), backend=backend)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_stored_head_without_an_embedding_serves_as_both(
    folder: Path, backend: str, tensor: int, pipeline: int
) -> None:
    same = load_file(folder / WEIGHTS)[EMBEDDING]
    oracle = store(folder, **{HEAD: same.clone(), EMBEDDING: None})
    check(folder, oracle, tensor, pipeline, backend)
