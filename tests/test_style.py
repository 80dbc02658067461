"""Limits of files, functions and folders, and timeouts of tests."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.deadlines import HANG_S
from tests.test_layers import FILES, ROOT

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 80
"""A Triton kernel has more arguments, and its parts share too many values to be functions."""
MAX_FOLDER_FILES = 15
MAX_PARAMETERS = 9

TABLES = {
    "kernels/cpu": "one C++ file for each operation, next to its Python file",
    "tests/benchmarks": "one file for each benchmark",
    "tests/conformance/peers": "one file for each group of tests of vLLM or SGLang",
    "tests/data/cases": "one file for each recorded request",
    "tests/gpu_report/stages": "one file for each stage of the report",
    "tests/kernels": "one file for each operation",
    "tests/kernels/triton": "one file for each operation",
}
"""Folder -> why it may hold more files: each file is one entry of a table, named after it."""
PRODUCT = [name for name in FILES if not name.startswith("tests/")]


def test_no_file_is_long() -> None:
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in FILES}
    long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert long == {}, "fold each of them into a folder"


def test_no_folder_has_many_files() -> None:
    """A folder without its `__init__.py` fits on a page. Files of every kind count."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = Counter(
        folder
        for folder, _, base in (name.rpartition("/") for name in names.splitlines())
        if base != "__init__.py" and (ROOT / folder / base).exists()
    )
    many = {name: count for name, count in folders.items() if count > MAX_FOLDER_FILES}
    assert set(TABLES) <= set(many), "these fit on a page"
    assert {name: count for name, count in many.items() if name not in TABLES} == {}


def test_each_folder_begins_with_a_docstring() -> None:
    folders = [name for name in PRODUCT if name.endswith("/__init__.py")]
    assert len(folders) > 50
    missing = [name for name in folders if not (ROOT / name).read_text().startswith('"""')]
    assert missing == [], "begin it with a docstring"


def test_no_function_is_long() -> None:
    long = {
        (name, function): lines
        for name in FILES
        for function, lines, most in function_lengths((ROOT / name).read_text())
        if lines > most
    }
    assert long == {}


def function_lengths(source: str) -> list[tuple[str, int, int]]:
    """Returns name, number of lines, and the limit of each function and method."""
    return [
        (
            node.name,
            (node.end_lineno or node.lineno) - node.lineno + 1,
            MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES,
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_lengths_of_functions_are_counted() -> None:
    """Otherwise the limit would not apply to any function."""
    source = "class A:\n    async def f(self):\n        a = 1\n        return a\ndef g(): ...\n"
    most = MAX_FUNCTION_LINES
    assert function_lengths(source) == [("g", 1, most), ("f", 3, most)]


def wide_signatures(source: str) -> dict[str, int]:
    """Returns qualified name -> number of parameters of each function above the limit. `self` and
    `cls` are not counted; `*args` and `**kwargs` count once each. A Triton kernel may have more:
    its parameters are pointers, strides and sizes."""
    return {name: count for name, count in _signatures(ast.parse(source)) if count > MAX_PARAMETERS}


def _signatures(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(child):
            given = child.args
            named = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            is_bound = isinstance(node, ast.ClassDef) and named[:1] in (["self"], ["cls"])
            count = len(named) - is_bound + bool(given.vararg) + bool(given.kwarg)
            yield inner.removesuffix("."), count
        yield from _signatures(child, inner)


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


def test_no_signature_is_wide() -> None:
    """More values belong together: in a frozen dataclass, each field with its docstring. Fields of
    dataclasses and structs do not count."""
    wide = {name: wide_signatures((ROOT / name).read_text()) for name in PRODUCT}
    assert {name: signatures for name, signatures in wide.items() if signatures} == {}


def test_parameters_are_counted() -> None:
    """Otherwise the limit would not apply to any function."""
    nine, ten = "a, b, c, d, e, f, g, h, i", "a, b, c, d, e, f, g, /, h, *, i, j"
    source = f"class A:\n    def f(self, {nine}): ...\n    async def g(self, {ten}): ...\n"
    source += f"def h({nine}, *k, **m):\n    def deep({ten}): ...\n"
    source += f"@triton.jit\ndef kernel({ten}): ...\n"
    assert wide_signatures(source) == {"A.g": 10, "h": 11, "h.deep": 10}


MAX_LINES_WITH_ANY = 260
"""Limit for the lines of `cluster/` that name `Any`. Most of them read JSON of unknown form, or
objects of libraries without types."""


def test_few_types_are_any() -> None:
    lines = [
        line
        for name in PRODUCT
        if name.startswith("cluster/")
        for line in (ROOT / name).read_text().splitlines()
        if re.search(r"\bAny\b", line) and "import" not in line
    ]
    assert len(lines) <= MAX_LINES_WITH_ANY, "name the type, or use `object` or a type variable"


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


WAITS = {"wait", "join", "result", "wait_for", "poll"}
"""Methods whose last positional argument may be a time limit."""
CLOCKS = {"monotonic", "perf_counter", "time"}


def limits(node: ast.AST) -> list[ast.expr]:
    """Returns the expressions in a node that are time limits of waits."""
    match node:
        case ast.BinOp(ast.Call(ast.Attribute(attr=clock)), ast.Add(), seconds):
            return [seconds] if clock in CLOCKS else []
        case ast.Call(function, arguments, keywords):
            is_wait = isinstance(function, ast.Attribute) and function.attr in WAITS
            named = [each.value for each in keywords if each.arg in ("timeout", "timeout_s")]
            return named + (arguments[-1:] if is_wait else [])
    return []


def short_timeouts(source: str) -> list[int]:
    """Returns the lines with a time limit that a busy machine may exceed. Below 20 s it is what a
    test is about."""
    return [
        limit.lineno
        for node in ast.walk(ast.parse(source))
        for limit in limits(node)
        if isinstance(limit, ast.Constant)
        and isinstance(limit.value, int | float)
        and 20 <= limit.value < HANG_S
    ]


OTHER_LIMITS = {
    "tests/gpu_report/test_report.py": "the report stops by itself",
    "tests/cluster/api/server/loop_stall.py": "milliseconds",
    "tests/cluster/cli/start/test_hub_model.py": "a download that hangs until the test ends",
    "tests/cluster/client/failover/test_no_leaks.py": "steps of an engine that joins",
}


@pytest.mark.parametrize(
    "line", ["wait(timeout=60)", "time.monotonic() + 60.0", "thread.join(30)", "it.wait_for(x, 20)"]
)
def test_a_short_limit_is_found(line: str) -> None:
    assert short_timeouts(line) == [1]
    for other in ("1", "HANG_S"):
        assert short_timeouts(re.sub(r"[0-9.]+(?=\)?$)", other, line)) == []


def test_waits_have_the_common_deadline() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" not in path.parts]
    found = {str(path.relative_to(ROOT)): short_timeouts(path.read_text()) for path in tests}
    assert {name for name, lines in found.items() if lines} == set(OTHER_LIMITS), (
        "see tests/support/deadlines.py"
    )


def test_every_request_of_a_test_has_a_timeout() -> None:
    """A busy machine may need more than the five seconds of httpx for any answer."""
    assert calls_without_timeout("httpx.get(url)\nhttpx.get(url, timeout=60)") == [1]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): calls_without_timeout(path.read_text()) for path in tests}
    assert {name: lines for name, lines in found.items() if lines} == {}
