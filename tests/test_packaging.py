"""The installed package contains exactly the files of the tree. The package list is written by
hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.deadlines import HANG_S
from tests.test_layers import FLOORS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_package_list_is_the_tree() -> None:
    found = {
        f"swell.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({"swell", *found})


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without `__init__.py` would work from the tree but be missing when installed."""
    folders = {path.parent for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    assert len(folders) > len(FLOORS)
    without = [folder for folder in folders if not (folder / "__init__.py").is_file()]
    assert without == [ROOT / "configs" / "models"], "scripts that stand alone"


def test_the_command_exists() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        path = ROOT.joinpath(*module.removeprefix("swell.").split(".")).with_suffix(".py")
        assert f"def {function}(" in path.read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a wheel from a copy of the tree, so that no build files are left in it. Returns the
    unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in (*FLOORS, "package"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run = subprocess.run(
        [*command, "--no-index", "--wheel-dir", folder / "dist", source],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = (folder / "dist").glob("swell-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
def test_the_wheel_contains_every_file_of_swell(wheel: Path) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for floor in FLOORS
        for pattern in ("*.py", "*.cpp", "*.h", "*.html", "*.css", "*.js")
        for path in (ROOT / floor).rglob(pattern)
    } - {"configs/models/train.py"}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*.yaml")}
    assert {"engine/core.py", "kernels/cpu/build.py"} < wanted
    packed = {p.relative_to(wheel / "swell").as_posix() for p in (wheel / "swell").rglob("*.*")}
    assert wanted - packed == set()
    assert not any(name.startswith("tests/") for name in packed)
    tops = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"swell"}, "something would be installed beside the package"


@pytest.mark.slow
def test_a_built_wheel_is_importable(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import swell.cluster.local, swell.cluster.cli.main, swell.kernels;"
        "import swell.engine.core as module;"
        "from swell import LLM, SamplingParams;"
        "print(module.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(wheel / "swell" / "engine" / "core.py")


def test_importing_the_package_imports_no_library() -> None:
    code = (
        "import sys, swell;"
        "assert not {'torch', 'ray', 'msgspec'} & set(sys.modules);"
        "assert swell.LLM.__module__ == 'swell.cluster.local';"
        "assert swell.SamplingParams.__name__ == 'SamplingParams';"
        "assert not hasattr(swell, 'Engine')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert run.returncode == 0, run.stderr
