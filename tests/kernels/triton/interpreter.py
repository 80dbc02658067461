"""Corrections of Triton's interpreter, whose results differ from those of a GPU. A shorter way to
the same results. A record of the launches, and a check of the memory that they use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
)

_ADDRESSES = {"addresses", "downs", "ups"}
"""Arguments of kernels that have addresses of other tensors."""


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


def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter leave out, for one test, what does not change a result. The types of
    tensors take most of its time.

    - Shapes are checked and converted once, and types of numpy are looked up once.
    - Operands of the same shape are not compared size by size.
    - Sums, differences and products of integers are not computed again in int64: only kernels in
      debug mode check them for an overflow.
    """

    def init_tensor(self: tl.tensor, handle: TensorHandle, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _constant(tuple(type.shape.values) if type.is_block() else ())

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[Any]) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, text = _checked(tuple(map(tl.core._unwrap_if_constexpr, shape)))
        self.name = f"<{text}, {element_ty}>"

    def np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    def broadcast(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> Any:
        some, others = left.type, right.type
        are_blocks = some.is_block() and others.is_block()
        if are_blocks and some.shape.values == others.shape.values:
            return left, right
        return broadcast_any(self, left, right)

    broadcast_any, of_scalar = TritonSemantic.broadcast_impl_value, cache(interpreter._get_np_dtype)
    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
    monkeypatch.setattr(tl.block_type, "__init__", init_block)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    options = InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def refuse_foreign_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses, for one test, reads and writes outside the memory of a kernel's tensors. On a GPU
    they may be an error, and what they read may be used nowhere, so that no result shows them.

    Kernels that find tensors by their addresses are not checked.
    """
    init, load, store, atomic = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_atomic_rmw,
    )
    begins, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    is_checked = False

    def init_args(self: GridExecutor, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal begins, ends, is_checked
        tensors = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
        storages = [x.untyped_storage() for x in tensors]
        memory = sorted({(each.data_ptr(), each.nbytes()) for each in storages})
        begins = np.array([begin for begin, _ in memory], np.uint64)
        ends = np.array([begin + size for begin, size in memory], np.uint64)
        is_checked = not _ADDRESSES & set(self.arg_names)
        return init(self, given, named)

    def check(addresses: TensorHandle, mask: TensorHandle) -> None:
        if not is_checked:
            return
        used = np.asarray(addresses.data)[np.asarray(mask.data, bool)]
        size = np.uint64(max(1, addresses.get_element_ty().primitive_bitwidth // 8))
        at = np.searchsorted(begins, used, side="right") - 1
        if (at < 0).any() or (used + size > ends[at]).any():
            raise IndexError("memory outside the tensors of the kernel")

    def masked_load(
        self: InterpreterBuilder, addresses: TensorHandle, mask: TensorHandle, *rest: Any
    ) -> TensorHandle:
        check(addresses, mask)
        return load(self, addresses, mask, *rest)

    def masked_store(
        self: InterpreterBuilder,
        addresses: TensorHandle,
        value: TensorHandle,
        mask: TensorHandle,
        *rest: Any,
    ) -> None:
        check(addresses, mask)
        store(self, addresses, value, mask, *rest)

    def atomic_rmw(
        self: InterpreterBuilder,
        operation: Any,
        addresses: TensorHandle,
        value: TensorHandle,
        mask: TensorHandle,
        *rest: Any,
    ) -> TensorHandle:
        check(addresses, mask)
        return atomic(self, operation, addresses, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "_init_args_hst", init_args)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", atomic_rmw)


def record_variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Returns a set to which each launch adds its variant until the end of the test: the name of
    the kernel, its constants and the options of the compiler. The interpreter adds the terms of a
    sum in the same order in all tiles, but a GPU may do so only within one variant."""
    variants, call = set(), GridExecutor.__call__

    def record(self: GridExecutor, *given: Any, **named: Any) -> None:
        arguments = {**dict(zip(self.arg_names, given, strict=False)), **named}
        fixed = {*self.constexprs, *named.keys() - set(self.arg_names)}
        variants.add((self.fn.__name__, *((name, arguments[name]) for name in sorted(fixed))))
        call(self, *given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", record)
    return variants


@contextmanager
def language() -> Iterator[None]:
    """Replaces the functions of Triton's language until the end of a test. The interpreter would
    look for all of them in each call of a function."""
    modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(modules)
    with patch.object(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope()):
        yield
    scope.restore()


@cache
def _constant(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """Returns the shape of a tensor and its number of elements."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


@cache
def _checked(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    """Returns the shape of a type, its number of elements, and the shape as a text."""
    if not sizes:
        raise TypeError("a block has at least one dimension")
    shape = tl.tuple(sizes)
    return shape, validate_block_shape(shape), str(shape)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values, rounded to bfloat16."""
    narrow = torch.from_numpy(np.atleast_1d(values)).bfloat16().view(torch.uint16)
    return narrow.numpy().reshape(np.shape(values))


def _widen(bits: np.ndarray) -> np.ndarray:
    """Returns the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
