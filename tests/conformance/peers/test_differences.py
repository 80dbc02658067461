"""The table of differences is the page's, and every row of it has a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance.peers.differences import DIFFERENCES

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "lab" / "compatibility.md"


def used() -> set[str]:
    keys = set()
    for file in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "differs":
                (key,) = node.args
                assert isinstance(key, ast.Constant)
                keys.add(key.value)
    return keys


def test_every_row_has_a_test() -> None:
    assert used() == set(DIFFERENCES)


def test_the_page_has_every_row() -> None:
    rows = [f"| `{key}` | {reason} |" for key, reason in DIFFERENCES.items()]
    lines = PAGE.read_text().splitlines()
    assert [row for row in rows if row not in lines] == []
