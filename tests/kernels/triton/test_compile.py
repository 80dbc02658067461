"""Every kernel compiles for three generations of GPUs without a GPU, within its budget.

Launches of the product's own functions are compiled instead of run, so that the variants are those
that the product would launch.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from swell.kernels import triton as column
from swell.kernels.backends import OPERATIONS
from tests.kernels.triton import (
    test_activation,
    test_attention,
    test_bitmask,
    test_cache,
    test_exact_attention,
    test_float8,
    test_inputs,
    test_linear,
    test_logprobs,
    test_lora,
    test_moe,
    test_norm,
    test_penalties,
    test_qkv,
    test_quantized,
    test_quantized_cache,
    test_rope,
    test_sample,
)
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Compute capability -> the most shared memory of one program: A100, H100 and H200, B200."""


class Budget(NamedTuple):
    launches: Callable[[torch.dtype], Iterable[None]]
    """Launches every variant of the operation for a type."""
    shared_bytes: int
    """Shared memory of a program. At most half of a multiprocessor's lets two programs run."""


BUDGETS = {
    "activation": Budget(test_activation.launches, 0),
    "attention": Budget(
        lambda dtype: chain(
            test_attention.launches(dtype),
            test_exact_attention.launches(dtype),
            test_cache.launches(dtype),
            test_quantized_cache.launches(dtype),
            test_quantized_cache.write_launches(dtype),
        ),
        100 << 10,
    ),
    "bitmask": Budget(test_bitmask.launches, 0),
    "inputs": Budget(test_inputs.launches, 0),
    "linear": Budget(
        lambda dtype: chain(
            test_linear.launches(dtype),
            test_quantized.launches(dtype),
            test_float8.launches(dtype),
        ),
        100 << 10,
    ),
    "logprobs": Budget(test_logprobs.launches, 4 << 10),
    "lora": Budget(test_lora.launches, 64 << 10),
    "moe": Budget(
        lambda dtype: chain(test_moe.launches(dtype), test_moe.quantized_launches(dtype)), 110 << 10
    ),
    "norm": Budget(test_norm.launches, 128),
    "penalties": Budget(test_penalties.launches, 4 << 10),
    "qkv": Budget(
        lambda dtype: chain(test_qkv.launches(dtype), test_quantized_cache.qkv_launches(dtype)), 0
    ),
    "rope": Budget(test_rope.launches, 0),
    "sample": Budget(test_sample.launches, 16 << 10),
}
"""Operation -> its budget."""


def test_every_operation_has_a_budget():
    names = {path.stem for path in Path(column.__file__).parent.iterdir()}
    assert names & set(OPERATIONS) == set(BUDGETS)


class _Machine:
    """A machine with a GPU, as far as compiling needs one. Triton caches kernels by device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=SHARED_BYTES, ids=lambda capability: f"sm_{capability}")
def compiled(request, monkeypatch) -> list[Any]:
    """Returns the kernels that are compiled in this test, for one GPU."""
    kernels = []

    def compile_only(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, warmup=True, **kwargs))

    run = JITFunction.run
    monkeypatch.setattr(driver, "_active", _Machine(request.param))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return kernels


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Returns the bytes of local memory of a thread: registers that are spilled."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=HANG_S
    ).stdout
    stacks = re.findall(r"STACK:(\d+)", usage) + re.findall(r"LOCAL:(\d+)", usage)
    assert len(stacks) == 2, usage
    return sum(map(int, stacks))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.slow_variants),  # compiled like bfloat16
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", BUDGETS)
def test_kernels_compile_within_their_budget(operation, dtype, compiled, tmp_path):
    budget = BUDGETS[operation]
    for _ in budget.launches(dtype):
        pass
    assert compiled
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        arch = kernel.metadata.target.arch
        assert kernel.metadata.shared <= min(budget.shared_bytes, SHARED_BYTES[arch]), kernel.name
        assert spilled_bytes(kernel, tmp_path) == 0, kernel.name


def test_weights_of_experts_are_copied_16_bytes_at_once(compiled):
    """The compiler knows that the addresses in the table are aligned."""
    for _ in test_moe.launches(torch.bfloat16):
        pass
    products = [kernel.asm["ptx"] for kernel in compiled if kernel.name == "_product"]
    assert products and all("cp.async.cg.shared.global" in ptx for ptx in products)
    assert not any("ld.global.b16" in ptx for ptx in products)


def test_rotations_round_products_before_sums(compiled):
    """A fused multiply-add would not be equal to torch's operations bit for bit."""
    for _ in test_rope.launches(torch.float32):
        pass
    assert compiled and not any("fma." in kernel.asm["ptx"] for kernel in compiled)


def test_quantized_weights_are_copied_16_bytes_at_once(compiled):
    """Neighbouring outputs of a panel, for every form."""
    for _ in test_quantized.launches(torch.bfloat16):
        pass
    products = [kernel.asm["ptx"] for kernel in compiled if kernel.name == "_quantized_linear"]
    assert products and all("cp.async.cg.shared.global" in ptx for ptx in products)
