"""Docstrings and comments are plain English: the banned openings and phrases do not occur."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_layers import ROOT

CHECKED = (
    "cluster",
    "configs",
    "coordinator",
    "engine",
    "examples",
    "kernels",
    "package",
    "tests",
    "worker",
)
"""Folders whose words are checked."""

OPENINGS = re.compile(
    r"(Of|What|Those|It|Its|That|Which|Who|Whose|Whom|Whatever|Whoever|Whichever|Where|As|So|Else|By"
    r"|And|But)\b"
)
"""A docstring begins with a verb or with a noun, not with one of these."""

PHRASES = {
    "inverted negation": r"(?<!there )(?<!that )\b(is|are|was|were|has|have) no"
    r" (?!longer\b|more\b|less\b)",
    "so many": r"\bso (many|much|long)\b",
    "alone": r"\balone\b",
    "anew": r"\banew\b",
    "whatever": r"\b(whatever|whoever|whichever|whom)\b",
    "is to be": r"\b(is|are|was|were) to (be|have)\b",
    "shall": r"\bshall\b",
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b(?! (a|the|its) (reverse |HTTP )?(proxy|proxies|load balancer))",
    "but for": r"\bbut for\b",
    "of which": r"\bof (which|whom|those|what)\b",
    "therein": r"\b(therein|thereof|thereby|hitherto|hence|thus|save for|else than|nought)\b",
    "inverted clause": r"\b(nor|neither) (is|are|does|do|has|have|can)\b",
}
"""Name -> a pattern that is not written, in any case."""
_PHRASES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PHRASES.items()}


def prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring: all docstrings, also of fields and constants, and
    all comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def without_names(text: str) -> str:
    """Prose without what is quoted in backticks, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"``?[^`]*``?", "`x`", text))


def complaints(source: str) -> list[str]:
    """One line for each banned opening or phrase in a file's docstrings and comments."""
    found = []
    for line, text, is_docstring in prose(source):
        plain = without_names(text)
        opening = OPENINGS.match(plain) if is_docstring else None
        if opening:
            found.append(f"{line}: begins with {opening[0]!r}: {plain[:80]}")
        for name, pattern in _PHRASES.items():
            for match in pattern.finditer(plain):
                found.append(f"{line}: {name}: {plain[max(0, match.start() - 40) :][:100]}")
    return found


NAMES = sorted(
    str(path.relative_to(ROOT)) for folder in CHECKED for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("name", NAMES)
def test_words_are_plain(name: str) -> None:
    assert complaints((ROOT / name).read_text()) == []


def test_complaints() -> None:
    assert complaints('"""Of a request."""') == ["1: begins with 'Of': Of a request."]
    assert len(complaints("# This is no queue, which is to be seen anew.")) == 3
    assert complaints('"""Returns the queue. There is no other: `so many alone`."""') == []
