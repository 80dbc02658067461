"""The device of a worker."""

from __future__ import annotations

import torch


def device_of(configured: str, local_rank: int) -> torch.device:
    """Returns the device of a worker; `auto` is a GPU if there is one. Raises `ValueError` if the
    GPU does not exist."""
    if configured == "cpu" or (configured == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but torch sees no GPU; set model.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"worker {local_rank} of this machine needs a GPU of its own, but torch sees "
            f"{torch.cuda.device_count()}; lower parallel.tensor or parallel.pipeline"
        )
    return torch.device("cuda", local_rank)
