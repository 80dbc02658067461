"""What this process holds on the GPU."""

from __future__ import annotations

import torch


def allocated() -> int:
    """Bytes, but for the workspaces that cuBLAS keeps for each thread that has used it."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
