"""Operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 or later.

Every kernel also runs on a CPU in Triton's interpreter, which `TRITON_INTERPRET=1` turns on before
triton is imported: tests do so. Importing this package raises `BackendUnavailable`, after one line
in the log, if Triton cannot run here.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from typing import NamedTuple

import torch

from swell.kernels.backends import BackendUnavailable

OLDEST_TRITON = (3, 6)
"""The version that comes with the oldest torch that Swell supports."""
OLDEST_GPU = (8, 0)
"""The oldest compute capability for which the kernels are compiled in tests: A100."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types that this backend computes; the reference backend computes tensors of other types."""

_log = logging.getLogger("swell.kernels")


class Tile(NamedTuple):
    """The sizes of a program that computes a product."""

    rows: int
    outputs: int
    inputs: int
    """The inputs of one step of its loop."""
    stages: int


def _reason() -> str | None:
    """Returns why Triton cannot run here, with the remedy; None if it can."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"{error}; install triton, which comes with torch's wheels for CUDA"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
        return f"triton is {version}; install {'.'.join(map(str, OLDEST_TRITON))} or later"
    if not torch.cuda.is_available():  # the interpreter, or compiling for another machine
        return None
    if (found := torch.cuda.get_device_capability()) < OLDEST_GPU:
        return f"the GPU has compute capability {found}; the kernels need {OLDEST_GPU} or later"
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name):
        return "no C compiler (CC, gcc, clang) is on the PATH; Triton needs one to launch kernels"
    return None


def _check() -> None:
    if reason := _reason():
        _log.warning(
            "GPU kernels are not available (%s): torch computes instead, with some 25 times as "
            "many kernel launches.",
            reason,
        )
        raise BackendUnavailable(reason)


_check()
