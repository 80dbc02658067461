"""The one way by which host arrays reach a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device, without a wait.

    On CPU it shares the array's memory. On CUDA it passes through pinned memory, which torch's
    host allocator does not hand out again before the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
