"""Grammars of calls in llguidance's Lark syntax, and helpers with which formats write them.

Only the arguments are `%json`, each with its own tool's schema, so that a `$ref` in it still points
into that schema. The text around them is literal, as the models were trained to write it.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from swell.cluster.text.grammar.structured_output import inline_json
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.parsers.deltas import Tool

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of a format's calls: its `marker`, then `body`, then `more`, as expressions in
    Lark."""

    marker: str
    body: str
    more: str = ""
    rules: list[str]
    """Rules that `body` and `more` use."""
    bare: str = ""
    """If set, calls may begin the answer without the marker. They begin with this character, and
    text must not."""


class GrammarBuilder(msgspec.Struct, frozen=True):
    """Creates expressions and rules for calls of some tools."""

    tools: Sequence[Tool]
    parallel: bool
    """Whether any number of calls is allowed; otherwise at most one is."""
    special: Mapping[str, int]
    """Maps text to id for this tokenizer's added tokens; a marker that is not an added token is
    written as text. The grammar refers to them by id, since llguidance cannot name tokens such as
    `[TOOL_CALLS]`."""

    def marker(self, text: str) -> str:
        return marker_expression(text, self.special)

    def repeated(self, expression: str) -> str:
        """Returns an expression for more calls; empty if at most one call is allowed."""
        return f"({expression})*" if self.parallel else ""

    def call_list(self) -> str:
        more = self.repeated('", " call')
        return f'"[" call {more} "]"' if more else '"[" call "]"'

    def json_calls(self, key: str) -> list[str]:
        """Returns rules of `call`: `{"name": "f", "<key>": {...}}`."""
        heads = [
            literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
            for tool in self.tools
        ]
        return self.delimited_calls(heads, literal("}"))

    def named_calls(self, separator: str) -> list[str]:
        """Returns rules of `call`: the name, the expression `separator`, and the arguments."""
        return self.delimited_calls([f"{literal(tool.name)} {separator}" for tool in self.tools])

    def delimited_calls(self, heads: Sequence[str], tail: str = "") -> list[str]:
        """Returns rules of `call`: the head of its tool, the arguments as JSON, the tail."""
        calls = [
            f"call_{index}: {head} args_{index} {tail}".rstrip() for index, head in enumerate(heads)
        ]
        args = [f"args_{index}: {arguments_as_json(tool)}" for index, tool in enumerate(self.tools)]
        return [f"call: {any_call(self.tools)}", *calls, *args]


def any_call(tools: Sequence[Tool]) -> str:
    """Returns `call_0 | call_1 ...`. Raises ValueError without tools."""
    if not tools:
        raise ValueError("a grammar of calls needs at least one tool")
    return " | ".join(f"call_{index}" for index in range(len(tools)))


def literal(text: str) -> str:
    return json.dumps(text)


def marker_expression(marker: str, special: Mapping[str, int]) -> str:
    """Returns the expression of a marker as this tokenizer writes it: added tokens, and text
    between them."""
    if marker in special:
        return f"<[{special[marker]}]>"
    names = [name for name in special if name in marker and len(name) > 2]
    if not names:
        return literal(marker)
    found = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    texts, ids = found.split(marker), [special[name] for name in found.findall(marker)]
    parts = [literal(texts[0])] if texts[0] else []
    for text, id in zip(texts[1:], ids, strict=True):
        parts += [f"<[{id}]>", *([literal(text)] if text else [])]
    return " ".join(parts)


def split_marker(marker: str, special: Mapping[str, int]) -> tuple[str, str]:
    """Returns the text of a marker before its first added token, and the expression of the rest,
    which is empty if the marker contains none."""
    for at in range(len(marker)):
        rest = marker_expression(marker[at:], special)
        if rest.startswith("<["):
            return marker[:at], rest
    return marker, ""


def parameters_of(tool: Tool) -> JsonSchema:
    """Returns the schema of a tool's arguments as an object: arguments are always one, even if the
    schema does not say so."""
    schema: JsonSchema = tool.parameters or NO_ARGUMENTS
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(
            f"parameters of tool {tool.name!r} have the type {kind!r}, but arguments are an "
            'object; send "type": "object"'
        )
    return {**schema, "type": "object"}


def arguments_as_json(tool: Tool) -> str:
    """Returns the arguments of a call as a part of a rule. Raises ValueError, which names the
    tool."""
    schema = parameters_of(tool)
    try:
        return inline_json(schema)
    except ValueError as error:
        raise ValueError(f"schema of tool {tool.name!r} {error}") from None


def regex_escaped(text: str) -> str:
    """Escapes a text for a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", r"\n")


def any_of(texts: Sequence[str]) -> str:
    """Returns a regular expression, for use between slashes, that matches any of these texts."""
    return f"({'|'.join(map(regex_escaped, texts))})"
