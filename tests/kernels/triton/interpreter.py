"""Corrections of Triton's interpreter, whose results differ from those of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrects the interpreter for one test.

    - bfloat16 is rounded to nearest; the interpreter cuts bits off.
    - `tl.dot` multiplies values of bfloat16; the interpreter multiplies their bit patterns.
    - `tl.dot` treats all rows of a tile alike: it adds in float64 and rounds the sum. The
      interpreter calls numpy's product, whose rounding depends on the row on some processors.
    - `tl.fma` rounds once; the interpreter rounds the product, too.
    - Tensors are not copied to themselves after a kernel. So they may be larger than the memory, if
      kernels touch few of their pages.
    """
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: InterpreterBuilder, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(_narrow(src.data), tl.bfloat16)
        if (src.dtype.scalar, dst_type.scalar) == (tl.bfloat16, tl.float32):
            return TensorHandle(_widen(src.data), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any
    ) -> TensorHandle:
        if d.dtype.scalar != tl.float32:
            return dot(self, a, b, d, *rest)
        left, right = (_widen(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        product = np.matmul(left, right, dtype=np.float64)
        return TensorHandle(product.astype(np.float32) + d.data, tl.float32)

    def create_fma(
        self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle
    ) -> TensorHandle:
        assert x.dtype.scalar == tl.float32, "the product of two floats is a double"
        product = x.data.astype(np.float64) * y.data.astype(np.float64)
        return TensorHandle((product + z.data).astype(np.float32), tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values, rounded to bfloat16."""
    narrow = torch.from_numpy(np.atleast_1d(values)).bfloat16().view(torch.uint16)
    return narrow.numpy().reshape(np.shape(values))


def _widen(bits: np.ndarray) -> np.ndarray:
    """Returns the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
