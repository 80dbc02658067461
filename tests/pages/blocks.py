"""The code blocks of the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.support.paths import ROOT

LANGUAGES = ("bash", "json", "nginx", "python", "text", "yaml")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_JOINS = {"&&", ";", "|"}
_VARIABLE = re.compile(r"\$([A-Z]+)")


class Block(NamedTuple):
    page: str
    line: int
    """The line of the page on which the block begins."""
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    """Returns the fenced code blocks of all pages."""
    return tuple(
        block
        for path in PAGES
        for block in blocks_of(path.relative_to(ROOT).as_posix(), path.read_text())
    )


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE))


def commands(code: str, variables: dict[str, str] | None = None) -> list[list[str]]:
    """Returns the words of each command of a shell script, without comments. Assignments are
    commands of one word; `variables` gets them and replaces their uses."""
    known = {} if variables is None else variables
    found: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(
            line.replace("$(uuidgen)", "an-id"), posix=True, punctuation_chars=";&|"
        )
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _JOINS:
                words.append(_VARIABLE.sub(lambda name: known.get(name[1], name[0]), word))
                continue
            if words:
                found.append(words)
                name, equals, value = words[0].partition("=")
                if equals and name.isupper():
                    known[name] = value
            words = []
    return found


def page_commands(page: str, url: str) -> list[list[str]]:
    """Returns the commands of a page, with its variables; `$URL` is that of a server."""
    variables = {"URL": url}
    return [
        words
        for block in blocks()
        if block.page == page and block.language == "bash"
        for words in commands(block.code, variables)
    ]
