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

from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, MarkedCall
from swell.cluster.text.parsers.deltas import Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder
from swell.cluster.text.parsers.json_check import JSON_TYPES
from swell.cluster.text.parsers.markup_grammar import markup_calls
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
    """Of models that forget `value_end`: what comes next ends a value too."""

    def value_ends(self) -> tuple[str, ...]:
        """What ends a value wherever it occurs."""
        padded = (self.padding + self.value_end,) if self.padding else ()
        return (self.value_end, *padded, *self.other_value_ends)


class MarkupCall(MarkedCall):
    def __init__(
        self,
        markup: Markup,
        types: Callable[[str, str], frozenset[str]],
        names: Iterable[str] | None = None,
    ) -> None:
        """`types`: what values a tool's argument may have. `names`: the tools that may be called;
        None: any."""
        self._markup = markup
        self._types = types
        self._pieces: list[str] = []
        self._num_keys = 0
        self._element = ""
        """What of one was read before its value."""
        self._key = ""
        self._value = TypedText(JSON_TYPES)
        self._matcher = Matcher(*markup.value_ends())
        if names is None:
            self._read_run(_NAME, self._end_name)
        else:
            heads = [name + markup.name_end for name in names]
            self._expect(dict.fromkeys(heads, self._end_known_head), skip_space=False)

    def take(self) -> str:
        taken, self._pieces = "".join(self._pieces), []
        return taken

    def flush(self) -> None:
        """What may have been the end of the value is taken for it, but the value is not whole."""
        if self._state == self._in_value:
            self._pieces.append(self._value.flush())

    def _break(self, unread: str) -> None:
        super()._break(self._element + unread)

    # ------------------------------------------------------------------------------- the head

    def _end_name(self, name: str) -> None:
        self.name = name
        if self._markup.name_end:
            self._expect({self._markup.name_end: self._end_head})
        else:
            self._begin_element("")

    def _end_known_head(self, head: str) -> None:
        self.name = head.removesuffix(self._markup.name_end)
        self._end_head("")

    def _end_head(self, _: str) -> None:
        self._mark_known()
        self._begin_element("")

    def _mark_known(self) -> None:
        if not self.known:
            self.known = True
            self._pieces.append("{")

    def _end_call(self, _: str) -> None:
        self._mark_known()
        self._pieces.append("}")
        self.ended = True

    # ----------------------------------------------------------------------------- an element

    def _begin_element(self, _: str) -> None:
        """It, or the end of the call, follows."""
        ends = dict.fromkeys(self._markup.call_ends, self._end_call)
        self._expect({self._markup.key_begin: self._begin_key, **ends})

    def _begin_key(self, begin: str) -> None:
        self._mark_known()
        self._element = begin
        self._read_run(_KEY, self._end_key)

    def _end_key(self, key: str) -> None:
        self._element += key
        self._key = key.strip()
        self._expect(dict.fromkeys(self._markup.key_ends, self._after_key))

    def _after_key(self, end: str) -> None:
        types = self._types(self.name, self._key)
        if len(self._markup.key_ends) > 1:
            types = _marked_types(types, is_string=end == self._markup.key_ends[0])
        self._value = TypedText(types)
        if self._markup.value_begin:
            self._element += end
            self._expect({self._markup.value_begin: self._begin_value})
        else:
            self._begin_value("")

    def _begin_value(self, _: str) -> None:
        comma = ", " if self._num_keys else ""
        self._num_keys += 1
        self._element = ""
        self._pieces.append(f'{comma}"{json_escaped(self._key)}": {self._value.push("")}')
        self._state = self._at_value

    def _at_value(self, text: str, at: int) -> int:
        self._state = self._in_value
        padding = self._markup.padding
        return at + len(padding) if padding and text[at] == padding else at

    def _in_value(self, text: str, at: int) -> int:
        shown, end, at = self._matcher.push(text, at)
        self._pieces.append(self._value.push(shown))
        if end is None:
            return at
        if self._value.in_json and end == self._markup.value_end:
            self._pieces.append(self._value.push(end))
            return at
        self._pieces.append(self._value.end())
        then: dict[str, Callable[[str], None]] = {self._markup.key_begin: self._begin_key}
        then |= dict.fromkeys(self._markup.call_ends, self._end_call)
        then.get(end.strip(), self._begin_element)(end.strip())
        return at


def _marked_types(types: frozenset[str], *, is_string: bool) -> frozenset[str]:
    """Of a value of which the model says whether it is a string."""
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
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
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
