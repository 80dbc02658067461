"""`model.exact` is refused where rounding depends on the batch, and accepted elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swell.configs.schema import Config, load
from swell.kernels.linear import numerics, panel
from swell.worker.exactness import refuse_inexact
from swell.worker.layers.attention import Attention
from swell.worker.worker import Worker
from tests.worker import tiny_models

pytestmark = pytest.mark.slow


def config_of(folder: Path, **model: Any) -> Config:
    tiny_models.make(folder, "qwen3")
    settings = {"path": str(folder), "device": "cpu", "exact": True, **model}
    return load({"model": settings, "cache": {"memory_bytes": 4_000_000}})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            {"dtype": "float16"},
            "products of the type float16 depend on the batch here; a CPU needs",
        ),
        ({"backend": "transformers"}, "transformers computes this model"),
    ],
)
def test_a_worker_refuses_a_model_whose_rounding_depends_on_the_batch(tmp_path, model, text):
    worker = Worker(config_of(tmp_path, **model))
    with pytest.raises(ValueError, match=f"model.exact=true: .*{text}.*set model.exact=false"):
        worker.load()
    worker.shutdown()


@pytest.mark.skipif(panel("cpu") is None, reason="no compiler: weights are not packed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_on_a_cpu_accepts_types_with_packed_weights(tmp_path, dtype):
    worker = Worker(config_of(tmp_path, dtype=dtype))
    worker.load()
    assert worker.mesh is not None and worker.mesh.exact
    worker.shutdown()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"dtype": "float16"}, "torch computes products of the type float16 here"),
        ({"backend": "transformers"}, "transformers computes Qwen3ForCausalLM"),
    ],
)
def test_a_portable_model_is_computed_by_the_kernels(tmp_path, model, text):
    worker = Worker(config_of(tmp_path, exact=False, numerics="portable", **model))
    with pytest.raises(ValueError, match=f"model.numerics=portable: {text}.*=auto"):
        worker.load()
    worker.shutdown()


@pytest.mark.skipif(
    "-fma-" not in (numerics("cpu") or ""), reason="kernels without FMA, or no compiler"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_with_fma_are_portable(tmp_path, dtype):
    worker = Worker(config_of(tmp_path, dtype=dtype, exact=False, numerics="portable"))
    worker.load()
    assert worker.measure().numerics.startswith(f"{numerics('cpu')}-")
    worker.shutdown()


def test_heads_that_a_gpu_does_not_compute_are_refused():
    layers = [Attention(2, 1, size, 1.0) for size in (128, 288)]
    with pytest.raises(ValueError, match="heads of 288, and a GPU computes heads of at most 256"):
        refuse_inexact(True, layers, torch.float32, torch.device("cuda"))
