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


def test_results_have_the_same_bits_on_all_processors(narrow: dict[str, str]) -> None:
    """Processors with vectors of another width, and without the instructions for products of
    bfloat16 and for sums of products of bytes."""
    command = ["-m", "tests.kernels.result_bits"]
    found, wanted = (run(command, each).splitlines() for each in (narrow, dict(os.environ)))
    assert len(wanted) > 200
    assert [line for line in found if line not in wanted] == []
