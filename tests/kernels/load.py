"""Loading a backend for a test."""

from __future__ import annotations

import os
import shutil
from types import ModuleType

import pytest

from swell.kernels import backends

COMPILERS = (os.environ.get("CXX"), "g++", "c++")


def load_backend(name: str, operation: str) -> ModuleType:
    """The module of a backend. Skips the test where the backend cannot run, that is without a
    compiler; where there is one, a library that does not build is a failure."""
    module = backends.load(name, operation)
    if module is None and any(shutil.which(compiler) for compiler in COMPILERS if compiler):
        pytest.fail(f"the backend {name} does not build here; its log line says why")
    if module is None:
        pytest.skip(f"the backend {name} cannot run here")
    return module
