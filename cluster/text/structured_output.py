"""The form that an answer must have, as a grammar that workers follow (docs/structured-output.md).

All kinds of wishes become one text in Lark's notation. It is compiled once here, so that what a
request is refused for is told to who sent it; what reaches a worker compiles there too. A check may
take long: call from a thread.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from swell.cluster.text.grammar_check import GrammarChecker
from swell.cluster.text.sampling_params import BadRequest, StructuredOutputs, shown
from swell.worker.sample.wire import GRAMMAR_LIMITS, Grammar

MAX_BYTES = 256 * 1024
"""Of a schema, or of any other wish, as UTF-8."""
MAX_SCHEMA_DEPTH = 100
"""Levels of arrays and objects in a schema's text; the compiler's own parser stops at 128."""
MAX_CHOICES = 10_000
MAX_GBNF_BYTES = 32 * 1024
"""Converting is quadratic in the number of rules: a second for the worst of this length."""
MAX_REASON_CHARS = 300

WHITESPACE = r"\x20|\n\x20{0,32}"
"""Where JSON allows space: one, or a line break and its indentation. A model that likes to write
JSON in lines may, and none can write blanks for ever."""

_KINDS = StructuredOutputs.__struct_fields__
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.S)
_LARK_PART = re.compile(r'["/#<]')
_LARK_COMMENT = re.compile(r"(?:#|//)[^\n]*")
_LARK_QUOTED = {
    '"': re.compile(r'"(?:\\.|[^"\\\n])*+("?)'),
    "/": re.compile(r"/(?:\\.|[^/\\])*+(/?)"),
}
"""A string and an expression, with their end where they have one. An expression may hold line
breaks, as the library reads it: a token may stand between two such expressions."""
_LARK_TOKEN = re.compile(r"<[^<>\n]*+>?")
"""Nothing else in Lark begins so."""
_EXCERPT = re.compile(r"\n[ \t]*\d+ \| ")
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are no schemas."""

_checker = GrammarChecker(GRAMMAR_LIMITS)
atexit.register(_checker.close)


class GrammarFragment(msgspec.Struct, frozen=True):
    """The form of an answer, or of a part of one: exactly one of these, in Lark's notation."""

    rule: str = ""
    """What a rule may refer to."""
    terminal: str = ""
    """What a terminal may be made of: with others by `&`, `|` and `~`."""
    grammar: str | None = None
    """A whole grammar with names of its own."""

    def alone(self) -> str:
        """The grammar of an answer that is this form."""
        if self.terminal:
            return f"start: FORM\nFORM: {self.terminal}"
        return f"start: {self.rule}" if self.grammar is None else self.grammar


class SchemaTooLong(ValueError):
    """A schema that no grammar has room for."""


def compile_grammar(form: StructuredOutputs, param: str | None = None) -> Grammar:
    """The grammar of a wish. Raises `BadRequest` for one that cannot be held.

    `param`: the path of the field that gave it, if it is not `structured_outputs.<kind>`.
    """
    kind, _ = _given(form, param)
    return compile_lark(
        grammar_fragment(form, param).alone(), param or f"structured_outputs.{kind}"
    )


def grammar_fragment(form: StructuredOutputs, param: str | None = None) -> GrammarFragment:
    """A wish as a part of a grammar, not compiled yet; as `compile_grammar` otherwise."""
    kind, value = _given(form, param)
    param = param or f"structured_outputs.{kind}"
    if isinstance(value, str):
        _check_bytes(value, param)
    return _FRAGMENTS[kind](value, param)


def _given(form: StructuredOutputs, param: str | None) -> tuple[str, Any]:
    """The one kind of a wish, and its value."""
    given = {kind: value for kind in _KINDS if (value := getattr(form, kind)) is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise BadRequest(
            f"structured_outputs must give exactly one of {', '.join(_KINDS)}; it gives "
            f"{' and '.join(given) or 'none'}",
            param or "structured_outputs",
        )
    return given.popitem()


def compile_lark(text: str, param: str) -> Grammar:
    """The grammar that a text in Lark's notation describes, as `llguidance` reads it.

    `param` is the path of the field that it was made from. Raises `BadRequest`.
    """
    _check_bytes(text, param)
    reason = _compile_errors.of(text)
    if reason:
        raise BadRequest(f"{param} is refused: {reason}", param, "invalid_grammar")
    return Grammar(text)


def inline_json(schema: dict[str, Any]) -> str:
    """`%json {...}`: a schema as a part of a rule, with bounded whitespace. ValueError for one that
    is too long: how long is found out first, by a quick writer, since the slow one would hold up
    all threads."""
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, RecursionError):
        size = 0  # the slow writer says what is wrong
    if size > MAX_BYTES:
        raise SchemaTooLong(f"has {size} bytes; at most {MAX_BYTES} are allowed")
    options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options})


class _CompileErrorCache:
    """What was found of the last texts, by their digests: the texts themselves may be long."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, lark: str) -> str:
        """Why the text does not compile, as people read it; empty: it does."""
        digest = hashlib.sha256(lark.encode()).digest()
        with self._lock:
            if digest in self._reasons:
                self._reasons.move_to_end(digest)
                return self._reasons[digest]
        reason = _reason(lark)
        with self._lock:
            self._reasons[digest] = reason
            while len(self._reasons) > self._limit:
                self._reasons.popitem(last=False)
        return reason


_compile_errors = _CompileErrorCache(limit=128)


def _reason(lark: str) -> str:
    reason = _EXCERPT.split(_checker.check(lark))[0].strip()
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


def _json(value: dict[str, Any] | bool | str, param: str) -> GrammarFragment:
    schema = _parsed(value, param) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{param}={shown(schema)} is no JSON schema: an object or true", param)
    if schema is False:
        raise BadRequest(f"{param}=false is a schema that no answer fits", param)
    schema = {} if schema is True else schema
    own = schema.get("$id")
    for reference in _references(schema, param):
        if not reference.startswith("#") and not (
            isinstance(own, str) and own and reference.startswith(own)
        ):
            raise BadRequest(
                f"{param} refers to {shown(reference)}: nothing is fetched; put the schema under "
                "$defs and refer to '#/$defs/<name>'",
                param,
            )
    try:
        return GrammarFragment(rule=inline_json(schema))
    except SchemaTooLong as error:
        raise BadRequest(f"{param} {error}", param) from None
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{param} holds what JSON cannot write: {error}", param) from None


def _parsed(text: str, param: str) -> Any:
    """A schema that came as text; only JSON's own constants are numbers."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not JSON: {error}", param) from None


def _references(schema: dict[str, Any], param: str) -> Iterator[str]:
    """Every `$ref` of a schema that is not too deep."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, list):
                below += node
                continue
            below += [part for key, part in node.items() if key not in _DATA]
            yield from (
                target
                for key in ("$ref", "$dynamicRef", "$recursiveRef")
                if isinstance(target := node.get(key), str)
            )
        level = [node for node in below if isinstance(node, dict | list)]
        if not level:
            return
    raise BadRequest(
        f"{param} has more than {MAX_SCHEMA_DEPTH} levels of objects and arrays; give inner "
        "schemas a name under $defs",
        param,
    )


def _json_object(_value: bool, _param: str) -> GrammarFragment:
    return GrammarFragment(rule=inline_json({"type": "object"}))


def lark_expression(pattern: str) -> str:
    """A regular expression as it stands between slashes. Digits and word characters are those of
    ASCII, as in JSON schema's patterns."""
    expression: str = regex_to_lark(pattern, "dw")
    return expression


def _regex(value: str, param: str) -> GrammarFragment:
    if not value:
        raise BadRequest(f"{param}='' is empty; an answer has at least one character", param)
    return GrammarFragment(terminal=f"/{lark_expression(value)}/")


def _choice(value: list[str], param: str) -> GrammarFragment:
    if not value:
        raise BadRequest(f"{param}=[] has nothing to choose from", param)
    if len(value) > MAX_CHOICES:
        raise BadRequest(f"{param} holds {len(value)} texts; at most {MAX_CHOICES} fit", param)
    for index, text in enumerate(value):
        if not text:
            path = f"{param}[{index}]"
            raise BadRequest(f"{path}='' is empty; an answer has at least one character", path)
    _check_bytes("".join(value), param)
    # One terminal: a lexer's automaton holds thousands of texts, a parser's rule does not.
    return GrammarFragment(terminal=" | ".join(map(_quoted, dict.fromkeys(value))))


def _quoted(text: str) -> str:
    """A text as Lark writes it: JSON does not escape DEL, and Lark must."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def _grammar(value: str, param: str) -> GrammarFragment:
    """Lark as it is, and llama.cpp's GBNF, whose rules have `::=`, converted."""
    if not _GBNF_RULE.search(value):
        return _lark_fragment(value, param)
    if len(value.encode()) > MAX_GBNF_BYTES:
        raise BadRequest(
            f"{param} has {len(value.encode())} bytes; a grammar in GBNF may have "
            f"{MAX_GBNF_BYTES}. Write it in Lark's notation, or shorter",
            param,
        )
    try:
        lark = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain_escape, value))
    except RecursionError:
        raise BadRequest(f"{param} nests its parentheses too deeply", param) from None
    except Exception as error:  # the converter raises plain ones
        raise BadRequest(f"{param} is no GBNF: {error}", param, "invalid_grammar") from None
    return _lark_fragment(lark, param)


def _plain_escape(match: re.Match[str]) -> str:
    """The character itself where an escape names one that needs none."""
    digits = next((group for group in match.groups() if group), None)
    if digits is None:
        return match[0]
    code = int(digits, 16)
    char = chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else ""
    return char if char.isprintable() and char not in '"\\[]^-/' and char else match[0]


def _lark_fragment(lark: str, param: str) -> GrammarFragment:
    """A user's grammar is about text: which token ids a model has is not known here."""
    if lark.lstrip().startswith("{"):
        raise BadRequest(
            f"{param}={shown(lark)} is neither Lark nor GBNF", param, "invalid_grammar"
        )
    for token in _lark_tokens(lark):
        raise BadRequest(
            f"{param} names the token {shown(token)}; only text can be asked for", param
        )
    return GrammarFragment(grammar=lark)


def _lark_tokens(lark: str) -> Iterator[str]:
    """The tokens that a grammar names, outside of strings, expressions and comments.

    Each character is read a fixed number of times. What opens a string that no quote ends on its
    line is a character like others, and so is every quote behind it on that line: each of them was
    the second half of an escape, so reading from there would go the same way to the same end. The
    same holds for expressions. The library refuses such a grammar.
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


def _check_bytes(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{param} holds a lone surrogate, which is no text", param) from None
    if size > MAX_BYTES:
        raise BadRequest(f"{param} has {size} bytes; at most {MAX_BYTES} are allowed", param)


_FRAGMENTS: dict[str, Callable[[Any, str], GrammarFragment]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
