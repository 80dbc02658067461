"""Limits of files, functions and folders, and timeouts of tests."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.test_layers import FILES, ROOT

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 15

TABLES = ("kernels", "worker/models", "tests/benchmarks", "tests/conformance/peers")
"""Folders that may hold more files: each file is one entry of a table, named after it."""
LARGE = ("tests/simulator",)
"""Folders that are not divided yet."""


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_long(name: str) -> None:
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines: fold it into a folder"


def test_no_folder_has_many_files() -> None:
    """A folder without its `__init__.py` fits on a page."""
    folders = Counter(
        folder
        for folder, _, base in (name.rpartition("/") for name in FILES)
        if base != "__init__.py" and folder not in TABLES + LARGE
    )
    assert {name: count for name, count in folders.items() if count > MAX_FOLDER_FILES} == {}


@pytest.mark.parametrize("name", FILES)
def test_no_function_is_long(name: str) -> None:
    lengths = function_lengths((ROOT / name).read_text())
    long = {function: lines for function, lines in lengths if lines > MAX_FUNCTION_LINES}
    assert not long, f"{name}: {long}"


def function_lengths(source: str) -> list[tuple[str, int]]:
    """Returns name and number of lines of each function and method."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_lengths_of_functions_are_counted() -> None:
    """Otherwise the limit would not apply to any function."""
    source = "class A:\n    async def f(self):\n        a = 1\n        return a\ndef g(): ...\n"
    assert function_lengths(source) == [("g", 1), ("f", 3)]


HTTP_CALLS = {"Client", "AsyncClient", "request", "stream", "get", "post", "put", "patch", "delete"}


def calls_without_timeout(source: str) -> list[int]:
    """Returns the lines that call httpx with its default timeout of five seconds."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in HTTP_CALLS) == ("httpx", True)
        and "timeout" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_request_of_a_test_has_a_timeout() -> None:
    """A busy machine may need more than the five seconds of httpx for any answer."""
    assert calls_without_timeout("httpx.get(url)\nhttpx.get(url, timeout=60)") == [1]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): calls_without_timeout(path.read_text()) for path in tests}
    assert {name: lines for name, lines in found.items() if lines} == {}
