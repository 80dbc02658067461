"""Finds operations that a CUDA graph cannot repeat: the host reads a value from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from swell.kernels.graph import NotCapturableError
from swell.kernels.host.dispatch_mode import DispatchMode

_READS = (
    *("_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"),
    *("unique_consecutive", "unique_dim", "_unique", "_unique2"),
)
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")


class RefuseHostReads(DispatchMode):
    """Raises `NotCapturableError` for an operation after which the host knows something about the
    contents of a tensor: a number, or how many elements a mask selects."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name in _INDEXES and _has_mask(args[1])):
            raise NotCapturableError(f"the host reads a result of torch's {name}")
        result = func(*args, **(kwargs or {}))
        if _leaves_device(args, result):
            raise NotCapturableError(f"torch's {name} copies from the device to the host")
        return result


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _leaves_device(args: Any, result: Any) -> bool:
    inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    on_host = isinstance(result, Tensor) and result.device.type == "cpu"
    return on_host and any(leaf.device.type != "cpu" for leaf in inputs)
