"""The GPU memory of this process."""

from __future__ import annotations

import gc

import torch


def allocated() -> int:
    """Returns the allocated bytes, without the workspaces that cuBLAS keeps for each thread that
    has used it, and without objects that are no longer referenced."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
