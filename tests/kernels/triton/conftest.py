"""Tests of the Triton kernels, without a GPU: `make test-triton` runs this folder in an environment
that has triton, in two processes, because triton reads TRITON_INTERPRET when it is imported.

    TRITON_INTERPRET=1   all files except test_compile.py: kernels compute on CPU tensors
    otherwise            test_compile.py: kernels are compiled for GPUs, and not run
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.test_layers import ROOT

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignores the test files of the other process; all of them without triton."""
    if not collection_path.name.startswith("test_"):
        return None
    compiles = collection_path.name == "test_compile.py"
    return None if HAS_TRITON and compiles != IS_INTERPRETED else True


@pytest.fixture(autouse=IS_INTERPRETED)
def _correct_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tests.kernels.triton import interpreter

    interpreter.correct(monkeypatch)
    interpreter.accelerate(monkeypatch)
    interpreter.refuse_foreign_memory(monkeypatch)
    # exp(-x) may overflow, as on a GPU.
    with interpreter.language(), np.errstate(all="ignore"):
        yield
