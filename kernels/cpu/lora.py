"""Adapters compiled from `lora.cpp`, with weights packed in the order in which it reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import INT, POINTER, Function, UnrecordedFunction
from swell.kernels.lora import LoraLayer, LoraTokens, LoraWeights
from swell.kernels.reference import lora as reference

_MAX_PARTS = 3
_lora = Function(
    "swell_lora",
    "rows",
    **dict.fromkeys(("x", "y", "layer", "tokens", "groups"), POINTER),
    **dict.fromkeys(("rows", "x_stride", "is_bf16"), INT),
)


_RANK_STEP = UnrecordedFunction("swell_lora_rank_step", result=INT)()
_OUT_STEP = UnrecordedFunction("swell_lora_out_step", result=INT)()


class _Adapter(ctypes.Structure):
    """The struct `Adapter` of lora.cpp."""

    _fields_ = [("down", POINTER), ("up", POINTER), ("ranks", INT), ("rank", INT * _MAX_PARTS)]


class _Layer(ctypes.Structure):
    """The struct `Layer` of lora.cpp."""

    _fields_ = [
        ("adapters", POINTER),
        ("num_adapters", INT),
        ("size", INT),
        ("parts", INT),
        ("outs", INT * _MAX_PARTS),
        ("all_outs", INT),
    ]


class CompiledLora(LoraLayer):
    """See `swell.kernels.lora.LoraLayer`."""

    def __init__(self, size: int, outs: Sequence[int], adapters: int, dtype: torch.dtype) -> None:
        self._adapters = (_Adapter * adapters)()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Adapter -> the packed tensors that `_adapters` points to."""
        self._dtype, self._size, self._outs = dtype, size, sum(outs)
        self._layer = _Layer(
            ctypes.addressof(self._adapters),
            len(self._adapters),
            self._size,
            len(outs),
            (INT * _MAX_PARTS)(*outs),
            self._outs,
        )

    def set(self, adapter: int, weights: LoraWeights | None) -> None:
        if weights is None:
            self._adapters[adapter] = _Adapter()
            self._kept.pop(adapter, None)
            return
        assert weights.down.dtype == self._dtype and weights.down.shape[1] == self._size
        down, up = _pack_down(weights.down), _pack_ups(weights.ups)
        ranks = [0 if part is None else part.shape[1] for part in weights.ups]
        self._adapters[adapter] = _Adapter(
            down.data_ptr(), up.data_ptr(), down.shape[1], (INT * _MAX_PARTS)(*ranks)
        )
        self._kept[adapter] = down, up

    def add(self, x: Tensor, y: Tensor, tokens: LoraTokens) -> None:
        assert x.dtype == y.dtype == self._dtype and y.is_contiguous(), (x.dtype, y.stride())
        assert x.shape[1] == self._size and y.shape[1] == self._outs, (x.shape, y.shape)
        if x.stride(1) != 1:
            x = x.contiguous()
        _lora(
            x.data_ptr(), y.data_ptr(), ctypes.addressof(self._layer), tokens.tokens.data_ptr(),
            tokens.groups_tensor.data_ptr(), len(x), x.stride(0), x.dtype == torch.bfloat16,
            used=(x, y, tokens.tokens, tokens.groups_tensor),
        )  # fmt: skip


def _padded(count: int, step: int) -> int:
    return -(-count // step) * step


def _pack_down(down: Tensor) -> Tensor:
    """[ranks, in] -> [in, padded ranks]"""
    ranks, size = down.shape
    packed = down.new_zeros(size, _padded(ranks, _RANK_STEP))
    packed[:, :ranks] = down.T
    return packed


def _pack_ups(ups: Sequence[Tensor | None]) -> Tensor:
    """Packs each [outs, rank] as [rank, padded outs], flat, one after the other."""
    packed = []
    for up in ups:
        if up is not None:
            outs, rank = up.shape
            part = up.new_zeros(rank, _padded(outs, _OUT_STEP))
            part[:, :outs] = up.T
            packed.append(part.flatten())
    return torch.cat(packed)


def make_layer(
    size: int,
    outs: Sequence[int],
    adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraLayer:
    """See `swell.kernels.lora.make_layer`."""
    if len(outs) > _MAX_PARTS or dtype not in TYPES:
        return reference.make_layer(size, outs, adapters, max_rank, dtype, device)
    return CompiledLora(size, outs, adapters, dtype)
