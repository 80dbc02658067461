"""Grammars that users write, in Lark's notation or llama.cpp's GBNF."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from swell.cluster.text.errors import BadRequest, bad_value
from swell.configs.error_text import shown

MAX_GBNF_BYTES = 32 * 1024
"""Limit on the length of a GBNF grammar: conversion is quadratic in the number of rules, and takes
a second for the worst case of this length."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.S)
_LARK_PART = re.compile(
    r"""(?:[#]|//)[^\n]*      # a comment
    | "(?:\\.|[^"\\\n])*+"?  # a string
    | /(?:\\.|[^/\\])*+/?    # an expression, which may hold line breaks
    | (?P<token><[^<>\n]*+>?)  # nothing else in Lark begins so
    """,
    re.VERBOSE,
)
"""Comments, strings and expressions, which may contain other parts of Lark, and token names. The
library refuses a grammar in which one is not closed. Each character is read once."""


def lark_of(grammar: str, param: str) -> str:
    """Returns a grammar in Lark's notation; converts GBNF, whose rules have `::=`. A user's grammar
    may only contain text, since token ids are specific to the model. `param` is the path of the
    field. Raises `BadRequest`."""
    lark = _from_gbnf(grammar, param) if _GBNF_RULE.search(grammar) else grammar
    if lark.lstrip().startswith("{"):
        raise bad_value(param, lark, "is neither Lark nor GBNF", "invalid_grammar")
    for part in _LARK_PART.finditer(lark):
        if token := part["token"]:
            raise BadRequest(
                f"{param} names the token {shown(token)}; a grammar may only contain text", param
            )
    return lark


def _from_gbnf(grammar: str, param: str) -> str:
    size = len(grammar.encode())
    if size > MAX_GBNF_BYTES:
        raise BadRequest(
            f"{param} has {size} bytes; at most {MAX_GBNF_BYTES} are allowed for a grammar in "
            "GBNF. Shorten it, or write it in Lark's notation",
            param,
        )
    try:
        lark: str = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain_escape, grammar))
        return lark
    except RecursionError:
        raise BadRequest(f"{param} nests its parentheses too deeply", param) from None
    except Exception as error:  # the converter raises plain exceptions
        raise BadRequest(f"{param} is not valid GBNF: {error}", param, "invalid_grammar") from None


def _plain_escape(match: re.Match[str]) -> str:
    """Replaces an escape by the character itself if that does not need one."""
    digits = next((group for group in match.groups() if group), None)
    if digits is None:
        return match[0]
    code = int(digits, 16)
    char = chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else ""
    return char if char.isprintable() and char not in '"\\[]^-/' and char else match[0]
