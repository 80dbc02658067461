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

ENGINES = {
    ("qwen3", "native"): True,
    ("gemma3", "native"): True,
    ("qwen3_moe", "native"): True,
    ("llama", "transformers"): False,
}
"""Family and backend of an engine -> whether torch's vectors do not change its class."""

PROGRAM = """
import sys
from tests.engine.outputs.test_numerics_class import run_engine
for folder, backend in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    print(*run_engine(folder, backend), sep="\\n")
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


Found = dict[tuple[str, str], tuple[str, str]]


def classes_and_answers(folders: Path, **environment: str) -> Found:
    """Runs all engines in a new process. Returns what `run_engine` returns for each."""
    command = [sys.executable, "-c", PROGRAM]
    for family, backend in ENGINES:
        command += [str(folders / family), backend]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()[-2 * len(ENGINES) :]
    return dict(zip(ENGINES, zip(lines[::2], lines[1::2], strict=True), strict=True))


@pytest.fixture(scope="module")
def wide_and_narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    folders = tmp_path_factory.mktemp("models")
    for family, _ in ENGINES:
        tiny_models.make(folders / family, family)
    narrow = classes_and_answers(folders, ATEN_CPU_CAPABILITY="avx2")
    return classes_and_answers(folders), narrow


@pytest.mark.parametrize("engine", ENGINES, ids="-".join)
def test_torch_belongs_to_the_class_where_it_computes(
    wide_and_narrow: tuple[Found, Found], engine: tuple[str, str]
) -> None:
    own, narrow = (found[engine] for found in wide_and_narrow)
    assert own[0].startswith(f"{numerics('cpu')}-")
    assert "logprobs" in own[1].lower()
    if ENGINES[engine]:
        assert own == narrow
    else:
        assert own[0] != narrow[0]
