r"""Calls with one markup element for each argument.

    <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
                ╰── head ───╯  ╰─── key ────╯ ╰value, its end╯  ╰─ end ──╯

Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2 differ in the texts between the elements, which `Markup`
names. The schema of a parameter decides what the text of a value means (`typed_text.py`). The
output is a JSON object, which is closed only if the model closes its call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from swell.cluster.text.parsers.call_reader import MAX_NAME_CHARS, Call
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.marker_search import Matcher
from swell.cluster.text.parsers.notations.json_check import JSON_TYPES
from swell.cluster.text.parsers.notations.markup_grammar import Markup, markup_calls
from swell.cluster.text.parsers.notations.sections import SectionParser
from swell.cluster.text.parsers.notations.typed_text import (
    STRING,
    TypedText,
    json_escaped,
    parameter_types,
)
from swell.cluster.text.parsers.text_reader import NotRead, Reading

_NAME = re.compile(rf'[^\s<>"]{{0,{MAX_NAME_CHARS + 1}}}')
_KEY = re.compile(rf'[^\r\n<>"]{{0,{MAX_NAME_CHARS + 1}}}')


class MarkupCall(Call):
    def __init__(
        self,
        markup: Markup,
        types: Callable[[str, str], frozenset[str]],
        names: Iterable[str] | None = None,
    ) -> None:
        """`types` returns the types that the value of a tool's argument may have. `names` are the
        tools that may be called; None allows any."""
        super().__init__()
        self._markup = markup
        self._types = types
        self._names = names
        self._num_keys = 0
        self._value: TypedText | None = None
        """The value that is being read."""

    def finish(self) -> None:
        """Ends an incomplete call: text that may be the beginning of the value's end marker is
        dropped, and the value stays incomplete."""
        if self._value is not None:
            self._pieces.append(self._value.flush())

    def _read(self) -> Reading[None]:
        markup = self._markup
        yield from self._read_name()
        marker = ""
        while marker not in markup.call_ends:
            if marker != markup.key_begin:
                marker = yield from self._one_of(markup.key_begin, *markup.call_ends)
            self._mark_known()
            if marker == markup.key_begin:
                types = yield from self._read_key()
                marker = yield from self._read_value(TypedText(types))
        self._pieces.append("}")

    def _read_name(self) -> Reading[None]:
        end = self._markup.name_end
        if self._names is not None:
            heads = [name + end for name in self._names]
            head = yield from self._one_of(*heads, skip_space=False)
            self.name = head.removesuffix(end)
            self._mark_known()
            return
        self.name = yield from self._run(_NAME)
        if end:
            yield from self._one_of(end)
            self._mark_known()

    def _mark_known(self) -> None:
        if not self.known:
            self.known = True
            self._pieces.append("{")

    def _read_key(self) -> Reading[frozenset[str]]:
        """Reads the key of an element, whose beginning was read, up to its value; returns the
        value's types. If it is not an element, all of it is unread."""
        markup, read = self._markup, self._markup.key_begin
        try:
            key = yield from self._run(_KEY)
            read += key
            end = yield from self._one_of(*markup.key_ends)
            if markup.value_begin:
                read += end
                yield from self._one_of(markup.value_begin)
        except NotRead as error:
            raise NotRead(read + error.unread) from None
        key = key.strip()
        self._pieces.append(f'{", " if self._num_keys else ""}"{json_escaped(key)}": ')
        self._num_keys += 1
        types = self._types(self.name, key)
        if len(markup.key_ends) > 1:
            types = _marked_types(types, is_string=end == markup.key_ends[0])
        return types

    def _read_value(self, value: TypedText) -> Reading[str]:
        """Reads a value; returns the marker that ends it or, if the model forgot that, the marker
        that follows."""
        self._pieces.append(value.push(""))
        self._value = value
        padding, value_end = self._markup.padding, self._markup.value_end
        if padding and (yield from self._char()) == padding:
            self._at += len(padding)
        matcher = Matcher(*self._markup.value_ends())

        def give(text: str) -> None:
            self._pieces.append(value.push(text))

        end = yield from self._up_to(matcher, give)
        while value.in_json and end == value_end:
            give(end)
            end = yield from self._up_to(matcher, give)
        self._pieces.append(value.end())
        self._value = None
        return end.strip()


def _marked_types(types: frozenset[str], *, is_string: bool) -> frozenset[str]:
    """Returns the types of a value that the model marks as a string, or as another value."""
    if is_string:
        return STRING if types >= STRING else types
    return types if types == JSON_TYPES else types - STRING or STRING


class MarkupParser(SectionParser):
    markup: Markup

    def __init__(
        self, make_id: Callable[[], str] | None = None, tools: Sequence[Tool] = ()
    ) -> None:
        super().__init__(make_id, tools)
        self._known_kinds: dict[tuple[str, str], frozenset[str]] = {}

    @classmethod
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        return markup_calls(cls, cls.markup, builder)

    def _new_call(self, *, bare: bool) -> MarkupCall:
        return MarkupCall(self.markup, self._types, self._tools if bare else None)

    def _types(self, name: str, key: str) -> frozenset[str]:
        tool = self._tools.get(name)
        if tool is None:
            return JSON_TYPES
        types = self._known_kinds.get((name, key))
        if types is None:
            types = parameter_types(tool.parameters, key)
            self._known_kinds[name, key] = types
        return types
