"""Loads a backend for a test."""

from __future__ import annotations

import os
import shutil
from types import ModuleType

import pytest

from swell.kernels import backends

COMPILERS = (os.environ.get("CXX"), "g++", "c++")


def load_backend(name: str, operation: str) -> ModuleType:
    """Returns the module of a backend. Skips the test if the backend cannot run, which is the case
    without a compiler. With a compiler, a library that does not build fails the test."""
    module = backends.load(name, operation)
    if module is None and any(shutil.which(compiler) for compiler in COMPILERS if compiler):
        pytest.fail(f"the backend {name} does not build here; its log line says why")
    if module is None:
        pytest.skip(f"the backend {name} cannot run here")
    return module
