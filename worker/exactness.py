"""Refuses a model that cannot be computed exactly (`model.exact`).

Results are exact if the bits of a row do not depend on its batch. Packed weights give that to
products (see `kernels/linear.py`), and every backend that packs weights has exact attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swell.kernels.attention import MAX_HEAD_DIM
from swell.kernels.linear import PackedTensor, pack
from swell.worker.layers.attention import Attention

_OR_NOT = "or set model.exact=false"


def refuse_inexact(
    is_native: bool, layers: Sequence[Attention], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises `ValueError` if the rounding of a model may depend on the batch. `is_native`: whether
    Swell computes its products; `layers`: its attention."""
    if not is_native:
        raise ValueError(
            "model.exact=true: transformers computes this model, and the rounding of its products "
            f"depends on the batch; use a model that has a native implementation, {_OR_NOT}"
        )
    largest = max((layer.head_dim for layer in layers), default=0)
    if device.type == "cuda" and largest > MAX_HEAD_DIM:
        raise ValueError(
            f"model.exact=true: the model has attention heads of {largest}, and a GPU computes "
            f"heads of at most {MAX_HEAD_DIM} exactly; use model.device=cpu, {_OR_NOT}"
        )
    probe = torch.zeros(1, 1, dtype=dtype, device=device)
    if not isinstance(pack(probe, exact=True), PackedTensor):
        needs = (
            "a CPU needs model.dtype=float32 or bfloat16 and a C++ compiler"
            if device.type == "cpu"
            else "a GPU needs Triton and a C compiler (swell doctor checks them)"
        )
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"model.exact=true: products of the type {name} depend on the batch here; {needs}, "
            f"{_OR_NOT}"
        )
