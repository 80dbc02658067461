"""Selects the backend that computes an operation on a device.

An operation has one name (`attention`, `norm`, ...) and a module of that name in every backend that
implements it, so `ls kernels/*/` shows the coverage. A backend that cannot run here (for example
without a compiler) raises `BackendUnavailable` when its package or module is imported, and the next
one is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import ModuleType

import torch

BACKENDS: dict[str, tuple[str, ...]] = {
    # device type -> backends, the fastest first
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "reference"),
}


OPERATIONS = (
    "activation",
    "attention",
    "bitmask",
    "inputs",
    "linear",
    "logprobs",
    "lora",
    "moe",
    "norm",
    "penalties",
    "qkv",
    "rope",
    "sample",
)


CompileProgress = Callable[[int, int], None]
"""Called with (files compiled, all files) while this process or another one compiles a backend."""


class BackendUnavailable(ImportError):
    """Raised when a backend cannot run on this machine; the message says why."""


@cache
def load(backend: str, operation: str) -> ModuleType | None:
    """Returns the module of an operation in a backend; None if the backend lacks it or cannot run
    here."""
    name = f"swell.kernels.{backend}.{operation}"
    if _import(f"swell.kernels.{backend}") is None or importlib.util.find_spec(name) is None:
        return None
    return _import(name)


@cache
def _import(name: str) -> ModuleType | None:
    """Returns a package or module of a backend; None if it cannot run here. It is tried once."""
    try:
        return importlib.import_module(name)
    except BackendUnavailable:
        return None


@cache
def get(operation: str, device: str) -> ModuleType:
    """Returns the fastest module that computes `operation` on a device type."""
    for backend in BACKENDS.get(device, ("reference",)):
        module = load(backend, operation)
        if module is not None:
            return module
    raise LookupError(f"no backend computes {operation!r} on {device!r}")


def prepare(device: str, progress: CompileProgress = lambda done, total: None) -> None:
    """Loads every operation before the first request needs it, and compiles it if needed. Lets
    torch's products of 16-bit types add in float32, which `kernels/linear.py` promises."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    for backend in BACKENDS.get(device, ()):
        if (build := load(backend, "build")) is not None:
            with suppress(BackendUnavailable):
                build.library(progress)
    for operation in OPERATIONS:
        get(operation, device)
