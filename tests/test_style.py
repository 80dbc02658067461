"""A file is a page or a few, and a function can be seen whole."""

from __future__ import annotations

import ast

import pytest

from tests.test_layers import FILES, ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_long(name: str) -> None:
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines: fold it into a folder"


@pytest.mark.parametrize("name", FILES)
def test_no_function_is_long(name: str) -> None:
    for node in ast.walk(ast.parse((ROOT / name).read_text(), name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {lines} lines"
