"""Which column computes an operation on a device.

An operation is one name (`attention`, `norm`, ...) and stands under that name in every column that
has it, so `ls kernels/*/` shows the coverage. A column that cannot run here (no compiler, say)
raises `ColumnUnavailable` when it is imported, and the next one is taken.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

COLUMNS: dict[str, tuple[str, ...]] = {
    # device type -> columns, the fastest first
    "cpu": ("cpu", "reference"),
    "cuda": ("reference",),
}


OPERATIONS = (
    "activation",
    "attention",
    "bitmask",
    "cache",
    "inputs",
    "linear",
    "logprobs",
    "moe",
    "norm",
    "penalties",
    "rope",
    "sample",
)


class ColumnUnavailable(ImportError):
    """A column that cannot run on this machine, and why."""


@cache
def load(column: str, operation: str) -> ModuleType | None:
    """The module of an operation in a column; None if the column lacks it or cannot run here."""
    name = f"swell.kernels.{column}.{operation}"
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except ColumnUnavailable:
        return None


@cache
def pick(operation: str, device: str) -> ModuleType:
    """The fastest module that computes `operation` on a device type."""
    for column in COLUMNS.get(device, ("reference",)):
        module = load(column, operation)
        if module is not None:
            return module
    raise LookupError(f"no column computes {operation!r} on {device!r}")


def prepare(device: str) -> None:
    """Load, and where needed compile, every operation before the first request needs it."""
    for operation in OPERATIONS:
        pick(operation, device)
