"""Most desktops have vectors half as wide as servers: the kernels compiled for them, where this
machine's own are wider."""

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


def has_wide_vectors() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " avx512f " in info.read_text()


@pytest.mark.skipif(not has_wide_vectors(), reason="this machine's own vectors are no wider")
def test_the_kernels_of_avx2_pass_the_same_tests(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.replace("${CXX:-g++}", os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "SWELL_CACHE": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    panel = "from swell.kernels.cpu.linear import PANEL; print(PANEL)"
    assert run("-c", panel).strip() == str(NARROW_PANEL)
    tests = ("--ignore", str(HERE), "-p", "no:cacheprovider", "-m", "not gpu")
    assert " passed" in run("-m", "pytest", str(HERE.parent), *tests).splitlines()[-1]
