"""`make` checks the Python version before it creates anything, announces long steps, and tests only
what has passed all other checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

PYTHON = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$1" in
  -c) exit {is_old} ;;
  --version) echo "Python 3.10.13" ;;
  -m) mkdir -p {folder}/venv/bin; cp {folder}/pip {folder}/venv/bin/pip ;;
esac
"""
PIP = """#!/bin/sh
echo "pip $PYTHONWARNINGS: $@"
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *, is_old: bool) -> subprocess.CompletedProcess[str]:
    """Runs `make setup` with a fake Python that creates a fake environment."""
    for name, text in (("python", PYTHON), ("pip", PIP)):
        program = folder / name
        program.write_text(text.format(folder=folder, is_old=int(is_old)))
        program.chmod(0o755)
    return subprocess.run(
        ["make", "setup", f"PYTHON={folder}/python", f"VENV={folder}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_an_old_python_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    done = make(tmp_path, is_old=True)
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    assert "Python 3.10.13, and Swell needs Python 3.11 or later" in done.stderr
    assert "make PYTHON=python3.12 setup" in done.stderr


def test_an_environment_of_an_older_python_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    done = make(tmp_path, is_old=False)
    assert done.returncode == 0, done.stderr
    assert "-m venv --clear" in (tmp_path / "calls").read_text()
    installed = [line for line in done.stdout.splitlines() if "--editable" in line]
    assert any(line.startswith("pip ignore: ") for line in installed), "warnings are not shown"
    assert not any("--quiet" in line for line in installed), "it takes minutes"
    assert (tmp_path / "venv" / ".installed").exists()


PROGRAM = """#!/bin/sh
program="{name}${{TRITON_INTERPRET:+ interpreted}}"
echo "$program: $@" >> {folder}/calls
mkdir -p {folder}/build/typecheck
test "$program" != "{failing}"
"""
PROGRAMS = {
    "ruff": "venv/bin/ruff",
    "mypy": "venv/bin/mypy",
    "pip": "venv/bin/pip",
    "python": "venv/bin/python",
    "triton": "triton/bin/python",
}


@pytest.mark.parametrize(
    ("failing", "target"),
    [
        ("ruff", "lint"),
        ("mypy", "typecheck"),
        ("triton", "triton-compiled"),
        ("triton interpreted", "triton-interpreted"),
        ("", ""),
    ],
)
def test_tests_run_only_after_all_checks_have_passed(
    tmp_path: Path, failing: str, target: str
) -> None:
    """Runs `make test` with programs that only note their calls. One of them fails."""
    (tmp_path / "tests/kernels/triton").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tests/kernels/triton/requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, path in PROGRAMS.items():
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(PROGRAM.format(name=name, folder=tmp_path, failing=failing))
        program.chmod(0o755)
    for name in ("venv", "triton"):
        (tmp_path / name / ".installed").touch()
    done = subprocess.run(
        ["make", "test", "VENV=venv", "TRITON=triton"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    is_tested = any(call.startswith("python: -m pytest -n") for call in calls)
    assert (done.returncode == 0, is_tested) == (not failing, not failing), done.stderr
    assert f": {target}] Error 1" in done.stderr or not failing
    if not failing:
        names = {call.partition(":")[0] for call in calls[:-1]}
        assert names == {"ruff", "mypy", "pip", "triton", "triton interpreted"}


def test_the_makefile_and_the_package_require_the_same_python() -> None:
    needed = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert needed is not None
    major, minor = needed.groups()
    text = (ROOT / "Makefile").read_text()
    assert f"({major}, {minor})" in text and f"Python {major}.{minor} or later" in text
