"""Compiles grammars in Lark's notation once, before a worker gets them."""

from __future__ import annotations

import atexit
import re
from functools import lru_cache

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.grammar_check import GrammarChecker
from swell.worker.sampler_wire import GRAMMAR_LIMITS, Grammar

MAX_BYTES = 256 * 1024
"""Limit on the length of a schema or other text that a grammar is made from, as UTF-8."""
MAX_LARK_BYTES = 4 * MAX_BYTES
"""Limit on the length of a grammar that is made from such a text: each property of a schema is a
rule."""
MAX_REASON_CHARS = 300
_NOTHING_FITS = "NoExtensionBias"
"""The beginning of the library's error if no token may follow."""

_UNSATISFIABLE = "Unsatisfiable schema"
"""The beginning of its error if no value fits a schema."""

_EXCERPT = re.compile(r"\n[ \t]*\d+ \| ")
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")

_checker = GrammarChecker(GRAMMAR_LIMITS)
atexit.register(_checker.close)


def compile_lark(text: str, param: str) -> Grammar:
    """Compiles a grammar in Lark's notation, as `llguidance` reads it.

    `param` is the path of the field that it was made from. Raises `BadRequest`.
    """
    reason = _reason(check_bytes(text, param, MAX_LARK_BYTES))
    if reason.startswith(_NOTHING_FITS):
        reason = "no text matches it"
    if reason:
        raise BadRequest(f"{param} is refused: {reason}", param, "invalid_grammar")
    return Grammar(text)


def is_empty_terminal(expression: str) -> bool:
    """Returns whether no text matches the expression of a terminal. Raises ValueError if it does
    not compile."""
    reason = _reason(f"start: FORM\nFORM: {expression}".encode())
    if reason and not reason.startswith(_NOTHING_FITS):
        raise ValueError(reason)
    return bool(reason)


def is_empty_rule(expression: str) -> bool:
    """Returns whether no text matches the expression of a rule, as far as the library finds."""
    return _reason(f"start: {expression}".encode()).startswith((_NOTHING_FITS, _UNSATISFIABLE))


def check_bytes(text: str, param: str, limit: int = MAX_BYTES) -> bytes:
    """Encodes a text that a grammar is made from. Raises `BadRequest` if it is too long."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise BadRequest(
            f"{param} contains a lone surrogate, which is not valid Unicode", param
        ) from None
    if len(data) > limit:
        raise BadRequest(f"{param} has {len(data)} bytes; at most {limit} are allowed", param)
    return data


@lru_cache(maxsize=128)
def _reason(lark: bytes) -> str:
    """Returns why the text does not compile, readable for users; empty if it does."""
    reason = _EXCERPT.split(_checker.check(lark.decode()))[0].strip()
    if "failed to compile JSON schema: " in reason:
        reason = _PLACE.sub("", reason).removeprefix("failed to compile JSON schema: ")
    head, _, error = reason.partition("\nerror: ")
    reason = f"{head.splitlines()[0].rstrip(':')}: {error}" if error else reason
    reason = reason.replace(
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf "
        "with anyOf",
        "oneOf is only supported where its schemas evidently exclude each other; use anyOf",
    )
    return " ".join(reason.split())[:MAX_REASON_CHARS]
