"""The parts of checkpoint tensors that a layer reads.

A layer knows its own shards: `weight_shards(...)` names each checkpoint tensor that it needs, the
part that belongs to this rank, and the memory for that part. The loader reads only that part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from swell.worker.comm.mesh import Group
from swell.worker.model_interfaces import HoldsTensors

ALL = slice(None)


@dataclass(frozen=True)
class WeightShard:
    """One part of one checkpoint tensor, and its target memory in a parameter."""

    name: str
    """The tensor's name in the checkpoint."""
    target: torch.Tensor
    """A view of the parameter; its shape is that of `tensor[index]`. It is on the meta
    device until the loader allocates the parameter."""
    index: tuple[slice | int, ...]
    """The part: one entry for each dimension of the checkpoint's tensor."""
    shape: tuple[int, ...]
    """The shape of the whole tensor in the checkpoint."""
    swaps: tuple[int, int] | None = None
    """Two dimensions that some checkpoints store in the other order."""
    offset: float = 0.0
    """A number that is added to the stored values."""

    def within(self, parameter: torch.Tensor) -> WeightShard:
        """Returns the same part of a parameter with memory, which replaces that of the target."""
        target = self.target
        view = parameter.as_strided(target.shape, target.stride(), target.storage_offset())
        return replace(self, target=view)

    def as_stored(self, shape: tuple[int, ...]) -> WeightShard:
        """Returns the shard for a stored tensor of this shape, with two dimensions swapped if only
        then the shape is right."""
        if self.swaps is None or shape == self.shape:
            return self
        order = list(range(len(self.shape)))
        one, other = self.swaps
        order[one], order[other] = other, one
        return WeightShard(
            self.name,
            self.target.transpose(one, other),
            index=tuple(self.index[at] for at in order),
            shape=tuple(self.shape[at] for at in order),
            offset=self.offset,
        )


def replicated_shard(name: str, parameter: torch.Tensor) -> WeightShard:
    """Returns the shard of a parameter that every rank holds in full."""
    return WeightShard(name, parameter, (ALL,) * parameter.dim(), tuple(parameter.shape))


def divide(what: str, total: int, group: Group) -> int:
    """Returns this rank's part of `total` equal units. Raises `ValueError` if the group's size does
    not divide `total`."""
    if total % group.size:
        fits = [str(n) for n in range(1, group.size) if total % n == 0]
        raise ValueError(
            f"parallel.tensor={group.size} does not divide the model's {what}={total}; "
            f"set parallel.tensor to one of {', '.join(fits)}"
        )
    return total // group.size


def empty_parameter(*shape: int) -> nn.Parameter:
    """Returns a parameter without memory, which is allocated when the model is complete."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


def set_types(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every parameter of `model` without memory the type that its module names as
    `parameter_dtype`, otherwise `dtype`."""
    for module in model.modules():
        own = getattr(module, "parameter_dtype", dtype)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                parameter.data = parameter.data.to(own)


def allocate(
    model: HoldsTensors, device: torch.device, late: Collection[nn.Parameter] = ()
) -> None:
    """Allocates memory on `device` for every parameter of `model` without memory, except those in
    `late`. Shared parameters stay shared."""
    late_ids = {id(parameter) for parameter in late}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or not old.is_meta or id(old) in late_ids:
                continue
            if id(old) not in made:
                data = torch.empty(old.shape, dtype=old.dtype, device=device)
                made[id(old)] = nn.Parameter(data, requires_grad=False)
            module._parameters[name] = made[id(old)]


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Sets the types of the parameters of `model` without memory, and allocates them on
    `device`."""
    set_types(model, dtype)
    allocate(model, device)
