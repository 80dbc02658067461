"""What this process holds on the GPU."""

from __future__ import annotations

import gc

import torch


def allocated() -> int:
    """Bytes, but for the workspaces that cuBLAS keeps for each thread that has used it, and for
    what no one refers to any more."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
