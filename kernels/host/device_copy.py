"""Copies from host arrays to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device, without waiting.

    On CPU the tensor shares the array's memory. On CUDA it is copied from pinned memory, which
    torch's host allocator does not reuse before the copy is done.
    """
    return copy_to_device(torch.from_numpy(array), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Does the same as `to_device` for a tensor on the host."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
