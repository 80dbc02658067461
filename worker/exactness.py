"""Decides what the bits of results depend on.

Results are exact (`model.exact`) if the bits of a row do not depend on its batch. Packed weights
give that to products (see `kernels/linear.py`), and every backend that packs weights has exact
attention. Workers of one *numerics class* find the same bits for a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from swell.kernels.attention import MAX_HEAD_DIM
from swell.kernels.cpu.build import processor
from swell.kernels.linear import PackedTensor, numerics, pack
from swell.worker.layers.attention import Attention
from swell.worker.model_interfaces import ComputesWithTorch, Model

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
    if not _packs(dtype, device):
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


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this type can have packed weights."""
    probe = torch.zeros(1, 1, dtype=dtype, device=device)
    return isinstance(pack(probe, exact=True), PackedTensor)


def numerics_class(model: Model, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the numerics class of a worker of this model.

    On a GPU it is the kind of the GPU and the version of torch. On a CPU it is the class of the
    compiled kernels, and a digest of the cosines that torch computes for tables of positions. If
    torch also computes products, it chooses its code by the processor, whose features then belong
    to the class.
    """
    torch_version = f"torch{torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device).replace(' ', '-')}-{torch_version}"
    own = numerics(device.type) if _packs(dtype, device) else None
    if own is not None and not isinstance(model, ComputesWithTorch):
        return f"{own}-{_digest_of_tables():08x}"
    capability, features = torch.backends.cpu.get_cpu_capability(), processor().encode()
    parts = own, torch_version, capability, f"{zlib.crc32(features):08x}"
    return "-".join(part for part in parts if part is not None)


def refuse_unportable(model: Model, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ValueError` if the bits of a model depend on the kind of processor
    (`model.numerics`)."""
    own = numerics(device.type) if device.type == "cpu" and _packs(dtype, device) else None
    if device.type != "cpu":
        reason = "the results of a GPU depend on its kind; set model.device=cpu"
    elif isinstance(model, ComputesWithTorch):
        reason = (
            f"transformers computes {model.transformers_model}, and torch chooses its code by the "
            "processor; use a model that has a native implementation"
        )
    elif own is None:
        reason = (
            f"torch computes products of the type {str(dtype).removeprefix('torch.')} here; a CPU "
            "needs model.dtype=float32 or bfloat16 and a C++ compiler"
        )
    elif "-fma-" not in own:
        reason = f"its kernels are compiled without FMA here ({own}); use a processor with FMA"
    else:
        return
    raise ValueError(f"model.numerics=portable: {reason}, or set model.numerics=auto")


def _digest_of_tables() -> int:
    """Returns a digest of the functions of torch that `layers/rotary.py` calls."""
    steps = torch.arange(64, dtype=torch.float32) / 64
    found = 0
    for base in (1e4, 5e5, 1e6):
        angles = torch.arange(64, dtype=torch.float32)[:, None] * (1.0 / base**steps)
        for table in (angles.cos(), angles.sin()):
            found = zlib.crc32(table.numpy().tobytes(), found)
    return found
