"""Settings of the test runs: the examples that property tests try, and the files that are marked
slow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_layers import ROOT


def examples(profile: str) -> list[int]:
    """Returns the examples of a property test under a profile."""
    tried: list[int] = []

    @settings(settings.get_profile(profile), max_examples=20, database=None)
    @given(st.integers())
    def run(number: int) -> None:
        tried.append(number)

    run()
    return tried


def test_the_default_profile_is_the_one_with_fixed_seeds(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile") is not None:
        pytest.skip("another profile was chosen")
    assert settings.default is not None
    assert settings.default.derandomize and settings.default.database is None


def test_only_the_random_profile_tries_new_examples() -> None:
    first, second = examples("ci"), examples("ci")
    assert first == second and len(first) > 10
    assert examples("random") != examples("random")


def is_marked_slow(path: Path) -> bool:
    """Returns whether `pytestmark` of the file contains the mark."""
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "pytest.mark.slow" in ast.unparse(node.value)
        for node in ast.parse(path.read_text()).body
    )


@pytest.mark.parametrize("folder", ["e2e", "conformance", "kernels"])
def test_folders_of_slow_tests_are_marked_in_each_file(folder: str) -> None:
    """The mark is not inherited, and a file without it would run in `make test-fast`."""
    files = list((ROOT / "tests" / folder).rglob("test_*.py"))
    assert len(files) > 3
    assert [path.name for path in files if not is_marked_slow(path)] == []
