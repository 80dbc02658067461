"""The interpreter still refuses what Triton's compiler refuses, and its results keep their bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

from tests.kernels.triton import interpreter

pytestmark = pytest.mark.slow


@triton.jit
def _shapes(rows: tl.constexpr, columns: tl.constexpr):
    tl.zeros([rows, 1], tl.float32) + tl.zeros([columns, columns], tl.float32)


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 3), (2, 4), (2**21, 1)])
def test_shapes_that_do_not_fit_are_refused(rows: int, columns: int) -> None:
    _shapes[(1,)](4, 4)
    with pytest.raises(InterpreterError, match=r"power of 2|incompatible dimensions|exceeds"):
        _shapes[(1,)](rows, columns)


@triton.jit
def _sums(x, result, size, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    wanted = (row < size) & (column < size)
    values = tl.load(x + row * size + column, mask=wanted, other=0).to(tl.float32)
    total = tl.sum(values * (row + 1), 0) + tl.max(values, 1) + size
    tl.store(result + tl.arange(0, SIZE), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_the_short_way_computes_the_same_bits(dtype: torch.dtype, monkeypatch) -> None:
    x, results = (50 * torch.randn(13, 13)).to(dtype), torch.empty(2, 16)
    _sums[(1,)](x, results[0], 13, 16)
    monkeypatch.undo()
    interpreter.correct(monkeypatch)
    _sums[(1,)](x, results[1], 13, 16)
    assert results.isfinite().all() and torch.equal(*results)


@triton.jit
def _copy(x, result, size, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(result + lane, tl.load(x + lane, mask=lane < size, other=0), mask=lane < 4)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 4), (6, 3)])
def test_memory_outside_the_tensors_of_a_kernel_is_refused(inputs: int, outputs: int) -> None:
    """Also what is read there and used nowhere: the kernel reads six numbers, and writes four."""
    _copy[(1,)](torch.empty(6), torch.empty(4), 6, 8)
    with pytest.raises(InterpreterError, match="outside the tensors"):
        _copy[(1,)](torch.empty(inputs), torch.empty(outputs), 6, 8)
