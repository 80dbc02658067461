"""The texts of a call with one markup element for each argument, and the grammar of such calls.
`markup.py` reads them.

    call: "<function=" (call_0 | call_1) "</function>"
    call_0: "f>" nl arg_0_0 (arg_0_1)?
    arg_0_0: "<parameter=a" val_0_0 nl
    val_0_0: ">\\n" text_0_0 | ">\\n" %json {...} "\\n</parameter>"

Arguments follow the order of the schema's properties. A string is text without its end marker;
every other value is `%json` with its own schema. These grammars cannot enforce keywords of a tool's
schema about the object as a whole, besides its properties: such keywords are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from swell.cluster.text.grammar.lark_compiler import MAX_BYTES
from swell.cluster.text.grammar.structured_output import inline_json
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import (
    CallGrammar,
    GrammarBuilder,
    any_call,
    any_of,
    marker_expression,
    parameters_of,
)
from swell.cluster.text.parsers.notations.sections import SectionParser
from swell.cluster.text.parsers.notations.text_grammar import (
    ANNOTATIONS,
    DEFINITIONS,
    OBJECT_KEYWORDS,
    TextGrammar,
    field,
    split_schema,
    with_definitions,
)
from swell.cluster.text.parsers.notations.typed_text import STRING, schema_types

NAME = re.compile(r'[^\s<>"]{1,256}')
KEY = re.compile(r'[^\s<>"]([^\r\n<>"]{0,254}[^\s<>"])?')
_EXTRA_KEY = "[A-Za-z_][-.A-Za-z0-9_]{0,63}"

_KEYWORDS = OBJECT_KEYWORDS | DEFINITIONS | ANNOTATIONS


class Markup(msgspec.Struct, frozen=True, kw_only=True):
    """The texts around the elements of a call, as a model is trained to write them."""

    name_end: str
    """Text after the name of the tool; empty if the first element or the end follows directly."""
    key_begin: str
    key_ends: tuple[str, ...]
    """Texts after the name of an argument. If there are two, the first marks the value as a string,
    the second as another value."""
    value_begin: str = ""
    """Text between the end of a key and the value."""
    value_end: str
    call_ends: tuple[str, ...]
    """Texts that end a call, the correct one first."""
    padding: str = ""
    """Text at both ends of a value that does not belong to it."""
    other_value_ends: tuple[str, ...] = ()
    """Texts that also end a value, for models that forget `value_end`: they normally follow it."""

    def value_ends(self) -> tuple[str, ...]:
        """Returns the texts that end a value wherever they occur."""
        padded = (self.padding + self.value_end,) if self.padding else ()
        return (self.value_end, *padded, *self.other_value_ends)


def markup_calls(kind: type[SectionParser], markup: Markup, builder: GrammarBuilder) -> CallGrammar:
    choice = any_call(builder.tools)
    begin = builder.marker(kind.call_begin) if kind.call_begin else ""
    one = f"nl {begin} ({choice}) {builder.marker(markup.call_ends[0])}"
    end = f"nl {builder.marker(kind.end_markers[0])}" if kind.end_markers else ""
    several = "+" if builder.parallel and kind.calls_share_section else ""
    body = f"call{several} {end}".strip()
    rules, size = [f"call: {one}"], 0
    for index, tool in enumerate(builder.tools):
        added = _ToolRules(markup, tool, str(index), builder.special).rules()
        rules += added
        size += sum(map(len, added))
        if size > MAX_BYTES:
            raise ValueError(
                f"need a grammar of more than {MAX_BYTES} bytes; allow fewer tools at once"
            )
    more = "" if kind.calls_share_section else f"nl {builder.marker(kind.section)} {body}"
    return CallGrammar(
        marker=kind.section,
        body=body,
        more=builder.repeated(more) if more else "",
        rules=[*rules, 'nl: "\\n"?'],
    )


class _ToolRules:
    """Creates the rules of one tool's name and arguments; the rules' names contain its `index`."""

    def __init__(self, markup: Markup, tool: Tool, index: str, special: Mapping[str, int]) -> None:
        self._markup = markup
        self._tool = tool
        self._index = index
        self._special = special
        end = markup.padding + markup.value_end
        self._end = marker_expression(end, special)
        self._text = TextGrammar(end, markup.value_ends(), special)
        self._schema = self._object()
        self._rules: list[str] = []
        self._size = 0
        """Number of characters of schemas in the rules: each repeats its definitions."""

    def rules(self) -> list[str]:
        if not NAME.fullmatch(self._tool.name):
            raise ValueError(
                f"tool {self._tool.name!r} has a name that calls in this model's "
                "format cannot contain; rename it"
            )
        head = marker_expression(self._tool.name + self._markup.name_end, self._special)
        elements = [
            self._element(str(number), *argument)
            for number, argument in enumerate(self._arguments())
        ]
        return [f"call_{self._index}: {' '.join([head, 'nl', *elements])}", *self._rules]

    def _object(self) -> JsonSchema:
        schema = parameters_of(self._tool)
        for keyword in sorted(set(schema) - _KEYWORDS):
            raise ValueError(
                f"parameters of tool {self._tool.name!r} have {keyword!r}, which cannot be "
                "enforced in this model's format of calls; describe each argument under "
                "'properties'"
            )
        return schema

    def _arguments(self) -> Iterator[tuple[str, bool, Any]]:
        """Yields key, whether it is required, and schema of each argument. An optional argument
        with a name that no call can contain is left out."""
        properties = field(self._schema, "properties", dict, {})
        required = field(self._schema, "required", list, [])
        for name in required:
            if not isinstance(name, str) or not KEY.fullmatch(name):
                raise self._refused(name, "has a name that calls cannot contain")
        others = self._schema.get("additionalProperties")
        for key in properties:
            if key in required or KEY.fullmatch(key):
                yield key, key in required, properties[key]
        for key in required:
            if key not in properties:
                yield key, True, True if others is None else others
        if others is not None and others is not False:  # an empty schema allows any value
            yield "", False, others

    def _element(self, number: str, key: str, required: bool, schema: Any) -> str:
        """Adds the rules of an argument and returns its expression. `key` is empty for arguments
        that the schema does not name."""
        rule, names = f"{self._index}_{number}", self._schema.get("properties", ())
        begin = marker_expression(self._markup.key_begin + key, self._special)
        if not key:
            but = f" & ~/{any_of(sorted(names))}/" if names else ""
            self._rules.append(f"KEY_{rule}: /{_EXTRA_KEY}/{but}")
            begin = f"{begin} KEY_{rule}"
        try:
            values = self._values(rule, schema)
        except ValueError as error:
            raise self._refused(key, str(error)) from None
        self._rules.append(f"arg_{rule}: {begin} ({' | '.join(values)}) nl")
        return f"arg_{rule}{'' if required else '?' if key else '*'}"

    def _values(self, rule: str, schema: Any) -> list[str]:
        """Returns the alternatives for the text after the key."""
        texts, other = split_schema(schema, self._schema)
        types = schema_types(schema, self._schema) - STRING if other is not None else frozenset()
        values = []
        for number, text in enumerate(texts):
            name = f"text_{rule}_{number}"
            self._rules += self._text.rules(name, text, types)
            values.append(f"{self._begin(0)} {name}")
        if other is not None:
            line = f"json_{rule}: {inline_json(with_definitions(other, self._schema))}"
            self._rules.append(line)
            self._size += len(line)
            if self._size > MAX_BYTES:
                raise ValueError(f"makes the tool's grammar longer than {MAX_BYTES} bytes")
            # The library fails if only a special token may follow a number.
            gap = "nl " if self._end.startswith("<[") else ""
            values.append(f"{self._begin(-1)} json_{rule} {gap}{self._end}")
        return values

    def _begin(self, kind: int) -> str:
        markup = self._markup
        if not markup.value_begin:
            return marker_expression(markup.key_ends[kind] + markup.padding, self._special)
        ends = (markup.key_ends[kind], markup.value_begin + markup.padding)
        return " nl ".join(marker_expression(end, self._special) for end in ends)

    def _refused(self, key: object, reason: str) -> ValueError:
        what = f"argument {key!r}" if key else "additionalProperties"
        return ValueError(
            f"{what} of tool {self._tool.name!r} {reason}: this cannot be enforced in this "
            "model's format of calls"
        )
