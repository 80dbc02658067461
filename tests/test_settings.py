"""How tests run: which examples they try, and which of them are slow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.test_layers import ROOT


def is_marked_slow(path: Path) -> bool:
    """Whether `pytestmark` of the file has it."""
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "pytest.mark.slow" in ast.unparse(node.value)
        for node in ast.parse(path.read_text()).body
    )


def test_examples_come_from_a_fixed_seed(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile") is None:
        assert settings.default is not None
        assert settings.default.derandomize and settings.default.database is None
    assert not settings.get_profile("random").derandomize


@pytest.mark.slow
def test_the_default_profile_repeats_its_examples(tmp_path: Path) -> None:
    """Two runs of the default profile print the same examples, two runs of `random` do not."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "from hypothesis import given, strategies as st\n"
        "@given(st.integers())\n"
        "def test_it(number): print(number)\n"
    )

    def examples(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", *options]
        run = subprocess.run(
            [*command, tmp_path / "test_it.py"], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout.partition("passed")[0].rpartition(".")[0]

    assert examples() == examples()
    assert examples("--hypothesis-profile=random") != examples("--hypothesis-profile=random")


@pytest.mark.parametrize("folder", ["e2e", "conformance", "kernels"])
def test_folders_of_slow_tests_are_marked_in_each_file(folder: str) -> None:
    """The mark is not inherited, and a file without it would run in `make test-fast`."""
    files = list((ROOT / "tests" / folder).rglob("test_*.py"))
    assert len(files) > 3
    assert [path.name for path in files if not is_marked_slow(path)] == []
