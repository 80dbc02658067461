"""Copies of the small model with changed weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import NANO


def copy_of(target: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None) -> Path:
    """Copies the model to another folder and changes its weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(NANO, target)
    weights = target / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    return target


def add_noise(tensors: dict[str, Any], seed: int) -> None:
    """Adds enough noise that nearly every answer differs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + (0.05 * noise * tensor.float().std(correction=0)).to(tensor.dtype)


def lose_a_tensor(tensors: dict[str, Any]) -> None:
    """Removes a tensor that an engine needs to load."""
    del tensors[next(name for name in sorted(tensors) if name.endswith("norm.weight"))]
