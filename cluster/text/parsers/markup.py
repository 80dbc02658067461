r"""Calls whose arguments are elements, one for each.

    <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
                ╰── head ───╯  ╰─── key ────╯ ╰value, its end╯  ╰─ end ──╯

Qwen3-Coder, GLM, MiniMax and DeepSeek V3.2 differ in the texts between the elements, which `Markup`
names. The schema of a parameter says what the text of a value means (`values.py`). The output is an
object in JSON, which is closed only where the model closes its call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, Call
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_check import JSON_TYPES
from swell.cluster.text.parsers.markup_grammar import markup_calls
from swell.cluster.text.parsers.matching import Matcher
from swell.cluster.text.parsers.reading import NotRead, Reading
from swell.cluster.text.parsers.sections import SectionParser
from swell.cluster.text.parsers.values import STRING, TypedText, json_escaped, parameter_types

_NAME = re.compile(rf'[^\s<>"]{{0,{MAX_NAME_CHARS + 1}}}')
_KEY = re.compile(rf'[^\r\n<>"]{{0,{MAX_NAME_CHARS + 1}}}')


class Markup(msgspec.Struct, frozen=True, kw_only=True):
    """The texts around the elements of a call, as a model is trained to write them."""

    name_end: str
    """Behind the name of the tool; empty: the first element or the end."""
    key_begin: str
    key_ends: tuple[str, ...]
    """Behind the name of an argument; of two the first says that the value is a string, the second
    that it is something else."""
    value_begin: str = ""
    """Between what ends a key and the value."""
    value_end: str
    call_ends: tuple[str, ...]
    """What ends a call, first as it should."""
    padding: str = ""
    """At both ends of a value, but not in it."""
    other_value_ends: tuple[str, ...] = ()
    """For models that forget `value_end`: texts after it that end a value, too."""

    def value_ends(self) -> tuple[str, ...]:
        """What ends a value wherever it occurs."""
        padded = (self.padding + self.value_end,) if self.padding else ()
        return (self.value_end, *padded, *self.other_value_ends)


class MarkupCall(Call):
    def __init__(
        self,
        markup: Markup,
        types: Callable[[str, str], frozenset[str]],
        names: Iterable[str] | None = None,
    ) -> None:
        """`types`: what values a tool's argument may have. `names`: the tools that may be called;
        None: any."""
        super().__init__()
        self._markup = markup
        self._types = types
        self._names = names
        self._num_keys = 0
        self._value: TypedText | None = None
        """The one that is read."""

    def finish(self) -> None:
        """What may have been the end of the value is taken for it, but the value is not whole."""
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
        """Read the key of an element, whose beginning was read, up to its value; returns the
        value's types. If it is no element, all of it is unread."""
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
        """What marks the end of the value or, where the model forgot that, what follows."""
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
    """The types of a value that the model marks as a string or as no string."""
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
        return markup_calls(cls, builder)

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
