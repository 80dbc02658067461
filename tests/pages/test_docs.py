"""Links of the documentation lead somewhere, and each page is reached from the index. A page begins
with its purpose, and its lines are short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_layers import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
INDEX = ROOT / "docs" / "index.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(
    r"(?<![\w/.-])((?:cluster|configs|coordinator|engine|examples|kernels|package|tests|worker)/"
    r"[\w/.-]*\w\.(?:py|yaml|sh|cpp|h|json))\b"
)
PATH = re.compile(r"(?<![\w/])docs/[\w/-]+\.(?:md|svg|json)\b")

MAX_LINE = 100
ATOM = re.compile(r"(?:`[^`]*`|\[[^\]]*\]\([^)\s]*\)|\S)+")
"""A word, a link or a piece of code, which a line break does not divide."""
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
GENERATED = re.compile(r"^<!-- \w+ -->$.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets of the links to files of this repository."""
    return [link for link in LINK.findall(CODE.sub("", text)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    fenced = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(fenced))
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[one](page.md#a-page) [two](page.md#b) [three](other.md) `[x](y)`")
    assert broken_links(page) == ["page.md#b", "other.md"]


def test_the_index_links_every_page() -> None:
    linked = {(INDEX.parent / link).resolve() for link in links(INDEX.read_text())}
    assert set((ROOT / "docs").rglob("*.md")) - linked == {INDEX}


def test_files_that_a_page_names_exist() -> None:
    named = {(str(page), name) for page in PAGES for name in FILE.findall(page.read_text())}
    assert len(named) > 100
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()


def test_paths_of_pages_exist() -> None:
    """Code, configuration files and pages name pages by their path in the repository."""
    sources = [
        path
        for folder in ("cluster", "configs", "coordinator", "engine", "kernels", "tests", "worker")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".sh"} and path != Path(__file__)
    ]
    named = {
        (name, str(path.relative_to(ROOT)))
        for path in [*sources, *PAGES, ROOT / "Makefile"]
        for name in PATH.findall(path.read_text())
    }
    assert len(named) > 20
    assert {(name, path) for name, path in named if not (ROOT / name).exists()} == set()


STEP = re.compile(r"^\| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|$", re.MULTILINE)
REQUEST_PATH = ROOT / "docs" / "design" / "request-path.md"


def defined_names(source: str) -> set[str]:
    """The classes and functions of a module, and the methods of its classes."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, methods)}
    return found


@pytest.mark.parametrize(("file", "function"), STEP.findall(REQUEST_PATH.read_text()))
def test_the_steps_of_a_request_are_in_their_files(file: str, function: str) -> None:
    assert function in defined_names((ROOT / file).read_text())


def test_each_step_of_a_request_is_read() -> None:
    rows = [line for line in REQUEST_PATH.read_text().splitlines() if line.count(" | `") == 2]
    assert len(STEP.findall(REQUEST_PATH.read_text())) == len(rows) > 30


def long_lines(text: str) -> list[str]:
    """Returns the lines that are too long and could be divided. Tables, fenced code, and what
    programs write into a page may be longer."""
    prose = FENCED.sub("", GENERATED.sub("", text)).splitlines()
    return [
        line
        for line in prose
        if len(line) > MAX_LINE
        and not line.lstrip().startswith("|")
        and len(ATOM.findall(ITEM.sub("", line, count=1))) > 1
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    assert long_lines(page.read_text()) == []


def test_long_lines_are_found() -> None:
    word, link = "word " * 20, f"[{'a b ' * 30}](page.md)"
    assert long_lines(f"{word}\n- {word}\n") == [f"- {word}"]
    assert long_lines(f"- `{word * 2}`,\n{link}.\n") == []
    assert long_lines(f"{link} and {link}") == [f"{link} and {link}"]
    assert long_lines(f"| {word * 2} |\n```text\n{word * 2}\n```\n") == []
    assert long_lines(f"<!-- bench -->\n{word * 2}\n<!-- end -->\n{word * 2}") == [word * 2]


def opening(page: Path) -> str:
    """Returns the first paragraph of a page after its title."""
    return page.read_text().split("\n\n")[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_its_purpose(page: Path) -> None:
    if page not in (ROOT / "README.md", INDEX):  # README says what Swell is, the index lists pages
        assert re.search(r"\b[Tt]his page\b", opening(page)), opening(page)
