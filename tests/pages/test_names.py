"""Pages and docstrings name attributes of classes that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.pages.test_docs import PAGES
from tests.test_layers import FILES, ROOT

ATTRIBUTE = re.compile(r"`([A-Z]\w*[a-z]\w*)\.(\w+)(?:\(\))?`")
"""Matches `Class.attribute` and `Class.method()`."""
OF_LIBRARIES = {"Runner", "SentenceTransformer"}
"""Classes of other projects that pages name."""


class ClassTable:
    """All classes of some sources. Classes with the same name count as one."""

    def __init__(self, sources: Iterator[str]) -> None:
        self._names: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    self._add(node)

    def _add(self, of: ast.ClassDef) -> None:
        bases = (ast.unparse(base).partition("[")[0] for base in of.bases)
        self._bases[of.name] |= {base.rpartition(".")[2] for base in bases}
        names = self._names[of.name]
        for node in ast.walk(of):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                names.add(node.attr)

    def has(self, name: str, attribute: str) -> bool:
        bases = self._bases.get(name, ())
        return attribute in self._names.get(name, ()) or any(
            self.has(base, attribute) for base in bases
        )

    def unknown(self, text: str) -> list[str]:
        """Returns each `Class.attribute` of a text that does not exist."""
        named = ATTRIBUTE.findall(text)
        return [
            f"{name}.{attribute}"
            for name, attribute in named
            if name not in OF_LIBRARIES and not self.has(name, attribute)
        ]


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def classes() -> ClassTable:
    paths = {*(ROOT / name for name in FILES), *TESTS}
    return ClassTable(path.read_text() for path in paths)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_attributes_that_a_page_names_exist(page: Path) -> None:
    assert classes().unknown(page.read_text()) == []


def test_attributes_that_code_names_exist() -> None:
    paths = {*(ROOT / name for name in FILES), *TESTS} - {Path(__file__)}
    unknown = {str(path.relative_to(ROOT)): classes().unknown(path.read_text()) for path in paths}
    assert {path: names for path, names in unknown.items() if names} == {}


def test_missing_attributes_are_found() -> None:
    source = (
        "class A1a:\n    one = 1\nclass B1b(A1a):\n    def two(self):\n        self.three = 1\n"
    )
    table = ClassTable(iter([source]))
    text = "`A1a.one` `B1b.one` `B1b.two()` `B1b.three` `A1a.two` `C1c.one` `Runner.run`"
    assert table.unknown(text) == ["A1a.two", "C1c.one"]
