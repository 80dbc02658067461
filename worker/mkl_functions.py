"""Initializes MKL's vector functions before several threads call one at the same time."""

from __future__ import annotations

import threading

import torch

FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.erfinv),
    *(torch.exp, torch.log, torch.log10, torch.log2, torch.sin, torch.sqrt, torch.tan),
    *(torch.tanh, torch.trunc),
)
"""The functions for which torch on CPU calls MKL (`ATen/cpu/vml.h`)."""

_lock = threading.Lock()


def initialize_vector_math() -> None:
    """Calls each function once in one thread; must run before a process computes anything.

    MKL selects the code of a function for this processor at the function's first call. If several
    threads make the first call at once, one of them may use a variant with half of the digits
    (oneMKL 2024.2, https://github.com/pytorch/pytorch/issues/188792). Because of that, one process
    in seven had a cosine table with errors of 1.5e-4, and its answers differed from those of its
    peers.
    """
    with _lock:
        for dtype in (torch.float32, torch.float64):
            number = torch.full((1,), 0.5, dtype=dtype)
            for function in FUNCTIONS:
                function(number)
