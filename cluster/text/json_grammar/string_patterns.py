r"""Patterns of strings: leading lookaheads, and patterns that only match a few fixed texts.

A pattern that begins with lookaheads, such as `^(?!\.)(?!.*\.\.)[a-z.]+$`, is converted to one
expression that must match, and one for each lookahead that must or must not match; Lark's terminals
can combine these. A lookahead or lookbehind in the middle of a pattern is not supported.
"""

from __future__ import annotations

import re

import msgspec
from llguidance import regex_to_lark

from swell.cluster.text.json_grammar.ecma_patterns import library_pattern

_SKIPPED = r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)"
"""An escaped character or a character class; an unclosed class reaches to the end, so that it is
read only once."""
_INNER_ANCHOR = re.compile(rf"{_SKIPPED}|([$^|])", re.S)
_LOOK_AROUND = re.compile(rf"{_SKIPPED}|(\(\?(?:=|!|<=|<!))", re.S)
_BRACKET = re.compile(rf"{_SKIPPED}|([()])", re.S)
_CHOICE = re.compile(rf"{_SKIPPED}|([()|])", re.S)
_META = re.compile(r"[\\.^$*+?()\[\]{}|]")
_MAX_FIXED = 64


class Lookahead(msgspec.Struct, frozen=True):
    """A lookahead at the beginning of a pattern."""

    negated: bool
    pattern: str
    """Without `^` at its beginning and `$` at its end."""
    is_to_end: bool
    """Whether it had the `$`."""


class SplitPattern(msgspec.Struct, frozen=True):
    rest: str
    """The pattern without its lookaheads."""
    ahead: list[Lookahead]


def looks_around(pattern: str) -> bool:
    return any(found[1] for found in _LOOK_AROUND.finditer(pattern))


def split_lookahead(pattern: str) -> SplitPattern | None:
    """Splits a pattern; returns None if it has a lookaround elsewhere than at its beginning."""
    if not looks_around(pattern):
        return SplitPattern(pattern, [])
    if not pattern.startswith("^"):
        return None
    rest, ahead = pattern[1:], []
    while rest.startswith(("(?=", "(?!")):
        end = _group_end(rest)
        if end is None:
            return None
        body, is_to_end = _split_end(rest[3 : end - 1].removeprefix("^"))
        if looks_around(body) or _has_choice_or_anchor(body):
            return None
        ahead.append(Lookahead(rest[2] == "!", body, is_to_end))
        rest = rest[end:]
    if not ahead or looks_around(rest) or _has_choice_or_anchor(_split_end(rest)[0]):
        return None
    return SplitPattern(f"^{rest}", ahead)


def _split_end(pattern: str) -> tuple[str, bool]:
    r"""Splits off the `$` at the end, which is an anchor unless it is escaped as `\$`."""
    body = pattern.removesuffix("$")
    num_escapes = len(body) - len(body.rstrip("\\"))
    return (body, True) if body != pattern and num_escapes % 2 == 0 else (pattern, False)


def _group_end(pattern: str) -> int | None:
    """Returns the position after the bracket that closes the group at the beginning."""
    depth = 0
    for found in _BRACKET.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[1] or "", 0)
        if found[1] == ")" and depth == 0:
            return found.end()
    return None


def _has_choice_or_anchor(pattern: str) -> bool:
    """Returns whether a pattern has `|` outside of groups, or `^` or `$` anywhere."""
    inner = {found[1] for found in _INNER_ANCHOR.finditer(pattern) if found[1]}
    return bool(inner & {"^", "$"}) or ("|" in inner and _top_level_choice(pattern))


def fixed_texts(pattern: str) -> list[str] | None:
    """Returns all texts of a pattern like `^score$` or `^(a|b)$`; None for other patterns."""
    if not (pattern.startswith("^") and pattern.endswith("$")) or len(pattern) < 2:
        return None
    body = pattern[1:-1]
    if body.startswith("(") and body.endswith(")"):
        body = body[1:-1].removeprefix("?:")
    elif "|" in body:
        return None
    texts = body.split("|")
    if len(texts) > _MAX_FIXED or any(_META.search(text) for text in texts):
        return None
    return texts


def lark_expression(pattern: str) -> str:
    """Converts a regular expression of the library to the form that Lark has between slashes.
    Digits and word characters are those of ASCII."""
    expression: str = regex_to_lark(pattern, "dw")
    return expression


def ecma_expression(pattern: str) -> str:
    """Converts a pattern of a JSON schema to the form that Lark has between slashes. Raises
    ValueError."""
    return lark_expression(library_pattern(pattern))


def search_expression(pattern: str) -> str:
    """Returns the expression for a whole text in which an ECMA pattern is found. Raises ValueError
    for a pattern with `^` or `$` inside, and for one that no grammar can enforce."""
    head = "" if pattern.startswith("^") else "(?s:.*)"
    body, ends = _split_end(pattern.removeprefix("^"))
    inner = {found[1] for found in _INNER_ANCHOR.finditer(body) if found[1]}
    if inner & {"^", "$"} or ("|" in inner and (not head or ends) and _top_level_choice(body)):
        raise ValueError(
            f"has the pattern {pattern!r}: ^ and $ are only allowed at its beginning and end"
        )
    try:
        return f"{head}({ecma_expression(body)}){'' if ends else '(?s:.*)'}"
    except ValueError as error:
        raise ValueError(f"has the pattern {pattern!r}, which {error}") from None


def _top_level_choice(body: str) -> bool:
    depth = 0
    for found in _CHOICE.finditer(body):
        depth += {"(": 1, ")": -1}.get(found[1] or "", 0)
        if found[1] == "|" and depth == 0:
            return True
    return False
