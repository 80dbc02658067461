"""Comparison with a definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Asserts that a result of type `dtype` is close to `wanted`, which is float64."""
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def rounds_like(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Asserts also that a result has the same roundings in between as `wanted`, which is float64.
    Without them, some 10% of the elements of a 16-bit type differ; a sum in float32 changes one in
    thousands."""
    close(got, wanted, dtype)
    if dtype != torch.float32:
        assert (got != wanted.to(dtype)).sum() <= 0.02 * got.numel()
