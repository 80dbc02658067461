"""Engines of one numerics class find the same bits. Torch uses narrower vectors in one of them, as
on another kind of processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreRequest
from swell.kernels.linear import numerics
from swell.worker.sampler_wire import SamplerParams
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no wider vectors than AVX2"
    ),
    pytest.mark.skipif(numerics("cpu") is None, reason="no compiler: torch computes"),
]

PROGRAM = """
import sys
from tests.engine.outputs.test_numerics_class import run_engine
print(*run_engine(*sys.argv[1:]), sep="\\n")
"""


def run_engine(folder: str, backend: str) -> tuple[str, str]:
    """Returns the class of an engine, and its tokens with their log probabilities."""
    settings = {
        "model.backend": backend,
        "model.dtype": "float32",
        "model.device": "cpu",
        "parallel.executor": "inproc",
        "cache.memory_bytes": 8_000_000,
    }
    config = load(folder, settings)
    executor = build_executor(config)
    core = EngineCore(config, executor, executor.start())
    found = []
    params = SamplerParams(temperature=0.9, seed=7, logprobs=5)
    core.add_request(EngineCoreRequest("r", [*range(3, 40)], params, 12), b"test")
    while core.has_work:
        found += [(o.new_token_ids, o.extras) for o in core.step().get(b"test", [])]
    core.shutdown()
    return core.limits.numerics, repr(found)


def class_and_answer(folder: Path, backend: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), backend]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-2:]


@pytest.mark.parametrize(
    ("family", "backend", "is_one_class"),
    [
        ("qwen3", "native", True),
        ("gemma3", "native", True),
        ("qwen3_moe", "native", True),
        ("llama", "transformers", False),
    ],
)
def test_torch_belongs_to_the_class_where_it_computes(
    tmp_path: Path, family: str, backend: str, is_one_class: bool
) -> None:
    tiny_models.make(tmp_path, family)
    own = class_and_answer(tmp_path, backend)
    narrow = class_and_answer(tmp_path, backend, ATEN_CPU_CAPABILITY="avx2")
    assert own[0].startswith(f"{numerics('cpu')}-")
    assert "logprobs" in own[1].lower()
    if is_one_class:
        assert own == narrow
    else:
        assert own[0] != narrow[0]
