"""Grammars of whole answers with calls.

    answer     = [reasoning] rest
    reasoning  = start token, text, end token     without the start if the prompt has written it
    rest       = calls | form | form or calls | text, calls, or text and then calls | anything

A *form* is the structured output of a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from swell.cluster.text.grammar.structured_output import GrammarFragment
from swell.cluster.text.parsers.grammar import (
    CallGrammar,
    any_of,
    marker_expression,
    regex_escaped,
    split_marker,
)

MAX_BLANKS = 4
"""Maximum number of blanks before a start token of reasoning."""


class ReasoningGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning that precedes the rest of an answer."""

    opening: str
    closing: str
    begun: bool
    """Whether the prompt has opened the reasoning, so that the answer begins inside it."""
    padding: str = "\n"
    """A character that may follow `closing` once or twice; empty if none may."""
    budget: int | None = None
    """Maximum number of tokens between opening and closing."""


class MessageGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of a format that writes an answer as messages, each after a header. Calls end an
    answer."""

    content: str
    """The header of text that is neither reasoning nor a call; empty if the prompt has written
    it."""
    before_calls: str
    """The header of text that calls follow."""
    between: str
    """The marker between text and calls."""
    free: CallGrammar
    """A call that the request does not constrain."""
    markers: tuple[str, ...]
    """Markers that no message contains."""


def answer(
    calls: CallGrammar | None = None,
    *,
    special: Mapping[str, int],
    required: bool = False,
    form: GrammarFragment | None = None,
    reasoning: ReasoningGrammar | None = None,
    start_markers: Sequence[str] = (),
    messages: MessageGrammar | None = None,
) -> str:
    """Returns the grammar of an answer: calls if they are `required`; the form or calls if both are
    given; the form; text, calls, or text and then calls; anything without both. Reasoning may
    precede it, and must if it has begun.

    `special` maps text to id for this tokenizer's added tokens. `start_markers` are texts besides
    the marker that the parser takes for the beginning of a call. Text and reasoning contain none of
    them, and forms do not begin with one if calls are possible, not even spelled by ordinary
    tokens: the parser could not see the difference. Raises ValueError for a budget that no grammar
    can enforce.
    """
    markers = (
        tuple(dict.fromkeys([calls.marker, *start_markers])) if calls else tuple(start_markers)
    )
    markers = tuple(one for one in markers if not any(two in one for two in markers if two != one))
    rest = _AnswerRules(calls, special, required, form, markers)
    if messages is not None:
        markers = messages.markers
        calls = messages.free if calls is None and form is None else calls
        rest = _MessageRules(calls, special, required, form, markers, messages)
    if reasoning is None:
        lines = rest.rules("start", ())
    else:
        lines = _reasoned(rest, reasoning, special, markers)
    lark = "\n".join(line.rstrip() for line in [*lines, *(calls.rules if calls else ())]) + "\n"
    if form is None or form.grammar is None:
        return lark
    grammars = [{"lark_grammar": lark}, {"name": "form", "lark_grammar": form.grammar}]
    return json.dumps({"grammars": grammars})


def _reasoned(
    rest: _AnswerRules,
    reasoning: ReasoningGrammar,
    special: Mapping[str, int],
    markers: tuple[str, ...],
) -> list[str]:
    opening, closing = (
        marker_expression(reasoning.opening, special),
        marker_expression(reasoning.closing, special),
    )
    gap = "GAP? " if reasoning.padding else ""
    lines = [f"GAP: /{any_of([reasoning.padding])}{{1,2}}/"] if gap else []
    after = rest.after(reasoning).rules("rest", ())
    if reasoning.begun:
        start = [f"start: inside {gap}rest"]
    elif reasoning.budget == 0:
        return rest.rules("start", (reasoning.opening,))
    else:
        # Bounded, since a model that likes blanks would write nothing else.
        blanks = [rf"SPACE: /[ \t\r\n]{{1,{MAX_BLANKS}}}/"] if gap else []
        space = "SPACE? " if gap else ""
        start = [f"start: {space}{opening} inside {gap}rest | unreasoned", *blanks]
        after += rest.rules("unreasoned", (reasoning.opening,))
    return [*start, *_inside(closing, reasoning, markers), *lines, *after]


def _inside(closing: str, reasoning: ReasoningGrammar, markers: tuple[str, ...]) -> list[str]:
    """Returns rules of `inside`: reasoning up to the end of its closing marker."""
    budget = reasoning.budget
    if budget == 0:
        return [f"inside: {closing}"]
    if closing.startswith("<["):
        limit = "" if budget is None else f"[max_tokens={budget}]"
        text = _text(holding=(reasoning.closing, *markers))
        return [f"inside: thoughts {closing}", f"thoughts{limit}: THOUGHTS", f"THOUGHTS: {text}"]
    if budget is not None:
        raise ValueError(
            "a limit on reasoning tokens is not supported by this model: the text that ends its "
            f"reasoning, {reasoning.closing!r}, is not a single token"
        )
    # A lazy lexeme ends with the first marker; another one would swallow its beginning.
    return [f"inside[lazy]: THOUGHTS {closing}", f"THOUGHTS: {_text(holding=markers)}"]


class _AnswerRules(msgspec.Struct, frozen=True):
    """Grammar rules of an answer after its reasoning, or without any."""

    calls: CallGrammar | None
    special: Mapping[str, int]
    required: bool
    form: GrammarFragment | None
    markers: tuple[str, ...]

    def after(self, reasoning: ReasoningGrammar) -> _AnswerRules:
        """Returns the same rules for use after reasoning: a form must not begin with its
        padding."""
        if self.form is None:
            return self
        return msgspec.structs.replace(self, form=unpadded(self.form, reasoning.padding))

    def rules(self, name: str, begins: tuple[str, ...]) -> list[str]:
        """Returns rules of `name`, whose text does not begin with one of `begins`."""
        calls = self.calls
        if calls is None and self.form is None:
            return self._anything(name, begins)
        if calls is None:
            return self._form(name, begins)
        start = marker_expression(calls.marker, self.special)
        after = f"{calls.body} {calls.more}"
        if self.required:
            return [f"{name}: {start}{'?' if calls.bare else ''} {after}"]
        if self.form is not None:
            head, *rules = self._form(name, (*begins, *self.markers))
            return [f"{head} | {start} {after}", *rules]
        return self._text_or_calls(calls, name, begins)

    def _form(self, name: str, begins: tuple[str, ...]) -> list[str]:
        form = self.form
        assert form is not None
        if form.terminal:
            # A rule of its own, since the alternatives of a terminal bind less tightly than `&`.
            own = f"{name.upper()}_FORM"
            return [
                f"{name}: {own}",
                f"{own}: {_unless(own + '_TEXT', begins)}",
                f"{own}_TEXT: {form.terminal}",
            ]
        return [f"{name}: {'@form' if form.grammar is not None else form.rule}"]

    def _text_or_calls(self, calls: CallGrammar, name: str, begins: tuple[str, ...]) -> list[str]:
        start, after = marker_expression(calls.marker, self.special), f"{calls.body} {calls.more}"
        ahead, rest = split_marker(calls.marker, self.special)
        text, bare = f"{name.upper()}_TEXT", calls.bare
        first = rf"/[ \t\r\n]*[^ \t\r\n{regex_escaped(bare)}](?s:.*)/" if bare else "/(?s:.+)/"
        lines = [f"{text}: {_text(first, holding=self.markers, begins=begins)}"]
        if bare:
            lines.append(f"{name}: {text}? | {start}? {after}")
        elif rest and not ahead:
            lines.append(f"{name}: {text}? ({start} {after})?")
        elif rest:
            # The added token in the marker ends the text before it.
            lead = f"{name.upper()}_LEAD"
            pattern = f"/(?s:.*){regex_escaped(ahead)}/"
            lines += [
                f"{name}: {text}? | {lead} {rest} {after}",
                f"{lead}: {_text(pattern, holding=self.markers, begins=begins)}",
            ]
        else:
            # A lazy lexeme ends with the first marker; the text terminal would swallow its
            # beginning.
            others = tuple(one for one in self.markers if one != calls.marker)
            lead = f"{name.upper()}_LEAD"
            lines += [
                f"{name}: {text}? | {name}_lead {after}",
                f"{name}_lead[lazy]: {lead} {start}",
                f"{lead}: {_text(holding=others, begins=begins)}",
            ]
        return lines

    def _anything(self, name: str, begins: tuple[str, ...]) -> list[str]:
        if not begins:
            return [f"{name}: <[*]>*"]
        opens = [name for name in self.special if any(one.startswith(name) for one in begins)]
        tokens = [id for name, id in self.special.items() if name not in opens]
        text = f"{name.upper()}_TEXT"
        lines = [f"{text}: {_text('/(?s:.+)/', begins=begins)}"]
        other = f" (<[{','.join(map(str, tokens))}]> <[*]>*)?" if tokens else ""
        return [f"{name}: {text}?{other}", *lines]


class _MessageRules(_AnswerRules, frozen=True):
    """Grammar rules of an answer in messages, whose headers say what they are."""

    messages: MessageGrammar

    def rules(self, name: str, begins: tuple[str, ...]) -> list[str]:
        calls, form = self.calls, self.form
        text, options, lines = f"{name.upper()}_TEXT", [], []
        if calls is not None:
            start = f"{self._before_calls(text)} {marker_expression(calls.marker, self.special)}"
            options.append(f"{start} {calls.body} {calls.more}")
        if form is not None and not self.required:
            options.append(f"{self._header} {name}_form")
            lines = self._form(f"{name}_form", ())
        elif not self.required:
            options.append(f"{self._header} {text}?")
        if any(text in option for option in options):
            lines.append(f"{text}: {_text('/(?s:.+)/', holding=self.markers)}")
        return [f"{name}: {' | '.join(options)}", *lines]

    @property
    def _header(self) -> str:
        header = self.messages.content
        return marker_expression(header, self.special) if header else ""

    def _before_calls(self, text: str) -> str:
        messages = self.messages
        between = marker_expression(messages.between, self.special)
        alone = self.required or self.form is not None
        if not messages.content:
            return between if alone else f"{text}? {between}"
        said = f"({marker_expression(messages.before_calls, self.special)} {text} {between})?"
        return "" if alone else said


def _text(
    pattern: str = "/(?s:.*)/", *, holding: Sequence[str] = (), begins: Sequence[str] = ()
) -> str:
    """Returns a terminal expression of text that contains none of the markers `holding` and begins
    with none of `begins`."""
    never = f" & ~/(?s:.*){any_of(holding)}(?s:.*)/" if holding else ""
    return _unless(pattern, begins) + never


def _unless(expression: str, begins: Sequence[str]) -> str:
    """Returns the expression without texts that begin with one of these markers; parsers skip
    whitespace before a marker."""
    return expression + (rf" & ~/[ \t\r\n]*{any_of(begins)}(?s:.*)/" if begins else "")


def unpadded(form: GrammarFragment, padding: str) -> GrammarFragment:
    """Returns the form without texts that begin with a padding; the whole form if it is not a
    terminal."""
    if not padding or not form.terminal:
        return form
    return GrammarFragment(terminal=f"({form.terminal}) & ~/{regex_escaped(padding)}(?s:.*)/")
