"""Torch's functions of single numbers, settled before several threads compute one together."""

from __future__ import annotations

import threading

import torch

FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.erfinv),
    *(torch.exp, torch.log, torch.log10, torch.log2, torch.sin, torch.sqrt, torch.tan),
    *(torch.tanh, torch.trunc),
)
"""What torch on CPU has MKL compute (`ATen/cpu/vml.h`)."""

_lock = threading.Lock()


def initialize_vector_math() -> None:
    """Call each function once in one thread: comes before anything is computed in a process.

    MKL finds the code of a function for this processor when it is first called. Where threads
    share that call, one of them may compute its part by a variant that gives half of the digits
    (oneMKL 2024.2, https://github.com/pytorch/pytorch/issues/188792). One process in seven had a
    table of cosines that was off by 1.5e-4 so, and answers that were not its peers'.
    """
    with _lock:
        for dtype in (torch.float32, torch.float64):
            number = torch.full((1,), 0.5, dtype=dtype)
            for function in FUNCTIONS:
                function(number)
