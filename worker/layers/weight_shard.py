"""What a layer wants from a checkpoint.

A layer knows its own shard: `weight_shards(...)` names each checkpoint tensor it needs, the part of
it that belongs to this rank, and the memory that the part goes to. The loader reads just that part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from swell.worker.mesh import Group

ALL = slice(None)


@dataclass(frozen=True)
class WeightShard:
    """One part of one checkpoint tensor and its place in a parameter."""

    name: str
    """Of the tensor in the checkpoint."""
    target: torch.Tensor
    """View of the parameter; its shape is that of `tensor[index]`."""
    index: tuple[slice | int, ...]
    """The part, one entry a dimension of the checkpoint's tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""


def replicated_shard(name: str, parameter: torch.Tensor) -> WeightShard:
    """A parameter that every rank keeps in full."""
    return WeightShard(name, parameter, (ALL,) * parameter.dim(), tuple(parameter.shape))


def divide(what: str, total: int, group: Group) -> int:
    """This rank's part of `total` equal things. Raises `ValueError` if they do not divide."""
    if total % group.size:
        fits = [str(n) for n in range(1, group.size) if total % n == 0]
        raise ValueError(
            f"parallel.tensor={group.size} does not divide the model's {what}={total}; "
            f"set parallel.tensor to one of {', '.join(fits)}"
        )
    return total // group.size


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter without memory: `materialize` gives it some when the model is complete."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter of `model` that has none memory on `device`; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or not old.is_meta:
                continue
            if id(old) not in made:
                data = torch.empty(old.shape, dtype=dtype, device=device)
                made[id(old)] = nn.Parameter(data, requires_grad=False)
            module._parameters[name] = made[id(old)]
