"""The kernels compiled for vectors half as wide as this machine's, which are those of most
desktops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__)
NARROW_PANEL = 16
COMPILER = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = -march=native ] && argument=-march=haswell
  set -- "$@" "$argument"
done
exec ${CXX:-g++} "$@"
"""
FILES = (
    *("elementwise", "paged_attention", "quantized_cache", "linear", "quantized", "sample"),
    *("logprobs", "bitmask"),
)
"""The tests of kernels that use vectors."""


def has_wide_vectors() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " avx512f " in info.read_text()


@pytest.fixture
def narrow(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that compile the kernels for AVX2: once for each version of the
    sources, since the library stays in a cache of its own."""
    if not has_wide_vectors():
        pytest.skip("this machine's own vectors are no wider")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.replace("${CXX:-g++}", os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    cache = Path(os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell") / "narrow"
    return {
        **os.environ,
        "CXX": str(compiler),
        "SWELL_CACHE": str(cache),
        "SWELL_TEST_PANEL": str(NARROW_PANEL),
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_kernels_of_avx2_pass_the_same_tests(narrow: dict[str, str]) -> None:
    tests = [str(HERE.with_name(f"test_{name}.py")) for name in FILES]
    output = run(["-m", "pytest", "-p", "no:cacheprovider", "-k", "cpu", *tests], narrow)
    assert " passed" in output.splitlines()[-1], output[-4000:]


PRODUCTS = """
import hashlib, itertools, torch
from swell.kernels.cpu import linear, moe
from swell.kernels.cpu.capture import choices
from swell.kernels.moe import ExpertTable
from swell.kernels.weights.quantized import QuantizedTensor
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for rows, size, outs in ((1, 300, 1000), (7, 257, 65), (40, 701, 96), (200, 64, 33)):
        weight = torch.randn(outs, size).to(dtype)
        x = torch.randn(rows, size).to(dtype)
        y = linear.linear(x, linear.pack(weight))
        print(dtype, rows, hashlib.sha256(y.float().numpy().tobytes()).hexdigest())
        for bits, has_mins, integers in itertools.product((4, 8), (False, True), (False, True)):
            form = torch.randint(2**bits, (outs, 256)).byte(), torch.rand(outs, 8).half()
            mins = torch.randn(outs, 8).half() if has_mins else None
            weight = linear.pack_quantized(QuantizedTensor(*form, mins, bits), dtype, integers)
            x = torch.randn(rows, 256).to(dtype)
            y = linear.linear(x, weight)
            print(bits, integers, hashlib.sha256(y.float().numpy().tobytes()).hexdigest())
    x, router = torch.randn(40, 77).to(dtype), torch.randn(9, 77).to(dtype)
    choices.product(x, router, logits := torch.empty(40, 9, dtype=dtype), has_rows=False)
    weights, chosen = moe.route(logits, 3, True)
    packed = [linear.pack(torch.randn(shape).to(dtype)) for shape in 9 * [(32, 77), (77, 16)]]
    table = ExpertTable(9, x.device, dict(enumerate(zip(packed[::2], packed[1::2]))))
    moe.expert_outputs(x, chosen, table, terms := torch.zeros(40, 3, 77, dtype=dtype))
    for y in (logits, weights, chosen, terms, moe.combine_experts(terms, weights)):
        print("experts", hashlib.sha256(y.double().numpy().tobytes()).hexdigest())
"""


def test_products_have_the_same_bits_on_all_processors(narrow: dict[str, str]) -> None:
    """Processors with vectors of another width, and without the instructions for products of
    bfloat16 and for sums of products of bytes."""
    assert run(["-c", PRODUCTS], narrow) == run(["-c", PRODUCTS], dict(os.environ))
