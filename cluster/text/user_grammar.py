"""Grammars that users write: Lark, and llama.cpp's GBNF."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import gbnf_to_lark

from swell.cluster.text.sampling_params import BadRequest, bad_value, shown

MAX_GBNF_BYTES = 32 * 1024
"""Converting is quadratic in the number of rules: a second for the worst of this length."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.S)
_LARK_PART = re.compile(r'["/#<]')
_LARK_COMMENT = re.compile(r"(?:#|//)[^\n]*")
_LARK_QUOTED = {
    '"': re.compile(r'"(?:\\.|[^"\\\n])*+("?)'),
    "/": re.compile(r"/(?:\\.|[^/\\])*+(/?)"),
}
"""A string and an expression, with their end where they have one. An expression may hold line
breaks, as the library reads it: a token may come between two such expressions."""
_LARK_TOKEN = re.compile(r"<[^<>\n]*+>?")
"""Nothing else in Lark begins so."""


def lark_of(grammar: str, param: str) -> str:
    """Lark as it is, and llama.cpp's GBNF, whose rules have `::=`, converted. A user's grammar is
    about text, since token ids are the model's own. `param` is the path of the field. Raises
    `BadRequest`."""
    lark = _from_gbnf(grammar, param) if _GBNF_RULE.search(grammar) else grammar
    if lark.lstrip().startswith("{"):
        raise bad_value(param, lark, "is neither Lark nor GBNF", "invalid_grammar")
    for token in _lark_tokens(lark):
        raise BadRequest(
            f"{param} names the token {shown(token)}; only text can be asked for", param
        )
    return lark


def _from_gbnf(grammar: str, param: str) -> str:
    size = len(grammar.encode())
    if size > MAX_GBNF_BYTES:
        raise BadRequest(
            f"{param} has {size} bytes; a grammar in GBNF may have {MAX_GBNF_BYTES}. Write it in "
            "Lark's notation, or shorter",
            param,
        )
    try:
        lark: str = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain_escape, grammar))
        return lark
    except RecursionError:
        raise BadRequest(f"{param} nests its parentheses too deeply", param) from None
    except Exception as error:  # the converter raises plain ones
        raise BadRequest(f"{param} is no GBNF: {error}", param, "invalid_grammar") from None


def _plain_escape(match: re.Match[str]) -> str:
    """The character itself where an escape names one that needs none."""
    digits = next((group for group in match.groups() if group), None)
    if digits is None:
        return match[0]
    code = int(digits, 16)
    char = chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else ""
    return char if char.isprintable() and char not in '"\\[]^-/' and char else match[0]


def _lark_tokens(lark: str) -> Iterator[str]:
    """The tokens that a grammar names, outside of strings, expressions and comments.

    Each character is read a fixed number of times. A quote without a second one on its line is a
    character like others, and so is every quote behind it on that line: each of them was the second
    half of an escape, so reading from there would take the same way to the same end. The same holds
    for expressions. The library refuses such a grammar.
    """
    at, unclosed = 0, {'"': 0, "/": 0}
    while (part := _LARK_PART.search(lark, at)) is not None:
        char, at = part[0], part.end()
        if comment := _LARK_COMMENT.match(lark, part.start()):
            at = comment.end()
        elif char == "<":
            token = _LARK_TOKEN.match(lark, part.start())
            assert token is not None, "the expression matches its first character"
            at = token.end()
            yield token[0]
        elif part.start() >= unclosed[char]:
            quoted = _LARK_QUOTED[char].match(lark, part.start())
            if quoted is not None and quoted[1]:
                at = quoted.end()
            elif quoted is not None:
                unclosed[char] = quoted.end()
