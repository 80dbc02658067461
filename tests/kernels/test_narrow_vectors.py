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
FILES = ("elementwise", "paged_attention", "linear", "sample", "logprobs", "bitmask")
"""The tests of kernels that use vectors."""


def has_wide_vectors() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " avx512f " in info.read_text()


@pytest.mark.skipif(not has_wide_vectors(), reason="this machine's own vectors are no wider")
def test_the_kernels_of_avx2_pass_the_same_tests(tmp_path):
    """The kernels for AVX2 pass the same tests. They are compiled once for each version of the
    sources; the library stays in a cache of its own."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.replace("${CXX:-g++}", os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    cache = Path(os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell") / "narrow"
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "SWELL_CACHE": str(cache),
        "SWELL_TEST_PANEL": str(NARROW_PANEL),
    }
    tests = [str(HERE.with_name(f"test_{name}.py")) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "cpu", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-4000:]
