"""Grammars of answers with calls, in llguidance's Lark syntax.

Only the arguments are `%json`, each under its tool's own schema, so that a `$ref` in it still
points into it; what stands around them is literal text, as the models were trained to write it.
Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from swell.cluster.parsers.parts import Tool
from swell.cluster.structured import inline_json

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """How a format writes calls: its `marker`, then `body`, then `more`, as expressions in Lark."""

    marker: str
    body: str
    more: str = ""
    rules: list[str]
    """What `body` and `more` refer to."""
    others: tuple[str, ...] = ()
    """Texts that the parser also takes for the beginning of calls, though no model should write
    them without the marker: text may hold none of them."""
    bare: str = ""
    """Calls may do without the marker where the answer begins; they begin with this character, so
    that text does not."""


def literal(text: str) -> str:
    return json.dumps(text)


def pattern_of(text: str) -> str:
    """The expression that matches the text alone, as it stands between `/`."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"n")


def spelled(text: str, special: Mapping[str, int]) -> str:
    """A text as this tokenizer writes it, which may hold special tokens."""
    if not text:
        return ""
    marks = "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True))
    pieces = re.split(f"({marks})", text) if marks else [text]
    return " ".join(mark(piece, special) for piece in pieces if piece)


def mark(marker: str, special: Mapping[str, int]) -> str:
    """A marker as this tokenizer writes it: one special token, or text."""
    return f"<[{special[marker]}]>" if marker in special else literal(marker)


def json_calls(tools: Sequence[Tool], key: str) -> list[str]:
    """Rules of `call`: `{"name": "f", "<key>": {...}}`."""
    heads = [
        literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
        for tool in tools
    ]
    return framed_calls(tools, heads, literal("}"))


def named_calls(tools: Sequence[Tool], args: str) -> list[str]:
    """Rules of `call`: the name, the mark `args`, and the arguments."""
    return framed_calls(tools, [f"{literal(tool.name)} {args}" for tool in tools], "")


def framed_calls(tools: Sequence[Tool], heads: Sequence[str], tail: str) -> list[str]:
    """Rules of `call`: the head of its tool, the arguments as JSON, the tail."""
    if not tools:
        raise ValueError("a grammar of calls needs at least one tool")
    calls = [
        f"call_{index}: {head} args_{index} {tail}".rstrip() for index, head in enumerate(heads)
    ]
    args = [f"args_{index}: {inline_json(parameters_of(tool))}" for index, tool in enumerate(tools)]
    choice = " | ".join(f"call_{index}" for index in range(len(tools)))
    return [f"call: {choice}", *calls, *args]


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Arguments are always an object, whatever else the schema leaves open."""
    schema: dict[str, Any] = tool.parameters or NO_ARGUMENTS
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(
            f"parameters of tool {tool.name!r} have the type {kind!r}; arguments are an object: "
            f'give "type": "object"'
        )
    return {**schema, "type": "object"}


def answer(calls: CallGrammar, *, special: Mapping[str, int], required: bool) -> str:
    """The grammar of an answer: calls where they are `required`; otherwise text, calls, or text and
    then calls. Text never holds the marker, not even spelled by ordinary tokens: the parser could
    not tell the difference.
    """
    marker, bare = calls.marker, calls.bare
    start = mark(marker, special)
    begins = "|".join(map(pattern_of, (marker, *calls.others)))
    holds_marker = f"/(?s:.*)({begins})(?s:.*)/"
    text = rf"/[ \t\r\n]*[^ \t\r\n{bare}](?s:.*)/" if bare else "/(?s:.+)/"
    behind = f"{calls.body} {calls.more}"
    if required:
        lines = [f"start: {start}{'?' if bare else ''} {behind}"]
    else:
        lines = [f"TEXT: {text} & ~{holds_marker}"]
        if bare:
            lines.append(f"start: TEXT? | {start}? {behind}")
        elif marker in special:
            lines.append(f"start: TEXT? ({start} {behind})?")
        else:
            # A lazy lexeme ends with the first marker; TEXT alone would swallow its beginning.
            others = "|".join(map(pattern_of, calls.others))
            lead = f"/(?s:.*)/ & ~/(?s:.*)({others})(?s:.*)/" if others else "/(?s:.*)/"
            lines += [f"start: TEXT? | lead {behind}", f"LEAD: {lead}", f"lead[lazy]: LEAD {start}"]
    return "\n".join(line.rstrip() for line in [*lines, *calls.rules]) + "\n"
