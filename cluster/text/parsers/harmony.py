"""Answers of gpt-oss: messages, each in a channel, in which reasoning and calls are one format.

    <|channel|>analysis<|message|>so it is 4.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 4.<|return|>

The prompt ends with `<|start|>assistant`, or further on in a message. `to=` may precede the
channel. What is sent to `functions.NAME`, or to a tool of the request, is a call with the message
as its arguments; other messages are reasoning in the channel `analysis` and content in all others.
Headers are markup: they are dropped, also where the answer breaks off in one, unless they are none.
Text outside of messages is content. A call in an answer that may have none is content.

Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from swell.cluster.text.parsers.answer_grammar import MessageGrammar
from swell.cluster.text.parsers.base import Matcher
from swell.cluster.text.parsers.calls import LiteralMatcher, end_of
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Reasoning, Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder, marker_expression
from swell.cluster.text.parsers.tools import ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
ENDS = ("<|end|>", "<|call|>", RETURN)
TO = "to="
MAX_HEADER_CHARS = 400

_HEADER = re.compile(r"[-+\w.:/= \t]*")
_CHANNEL = re.compile(r"<\|channel\|>[ \t]*(\w+)")
_RECIPIENT = re.compile(r"\bto=([-\w.:/]+)")
_NAMESPACE = "functions."
_ASSISTANT = f"{START}assistant"
_CALL = f"{CHANNEL}commentary to={_NAMESPACE}"


class HarmonyParser(ToolParser):
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    start_markers = (START, CHANNEL)
    keeps_special_tokens = True

    start_token = f"{CHANNEL}analysis{MESSAGE}"
    end_token = f"<|end|>{_ASSISTANT}"
    padding = ""
    """How reasoning begins and ends after the prompt, as a grammar writes it."""

    def __init__(
        self,
        make_id: Callable[[], str] | None = None,
        tools: Sequence[Tool] | None = (),
        prompt: str = "",
        constrained: bool = False,
    ) -> None:
        """`tools`: None where none may be called. `prompt`: the end of its text, which may have
        begun a message. `constrained`: a grammar ends the answer with the first content or call
        that is in the channel for it, so nothing in that is a marker."""
        super().__init__(make_id, tools or ())
        self._may_call = tools is not None
        self._ends_with_first = False
        self._begin_between()
        self._make_delta: Callable[[str], AnswerDelta] = Content
        self._num_header_chars = 0
        self._num_messages = 0
        """Those that have begun, and texts outside of any."""
        _, found, begun = prompt.rpartition(START)
        if found and begun != "assistant":
            self._begin_header(START)
            self._read(begun)
            self._take()
        self._ends_with_first = constrained

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return prompt.endswith(cls.start_token)

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        return not prompt.endswith(_ASSISTANT)

    @classmethod
    def messages(cls, prompt: str, special: Mapping[str, int]) -> MessageGrammar:
        """How a grammar writes what follows this prompt."""
        header_follows = prompt.endswith(_ASSISTANT) or cls.opened_by_prompt(prompt)
        constrain, message = (marker_expression(text, special) for text in (CONSTRAIN, MESSAGE))
        free = CallGrammar(
            marker=_CALL,
            body=f'FREE_NAME ({constrain} "json")? {message} FREE_ARGUMENTS?',
            rules=[r"FREE_NAME: /[-\w.]{1,128} ?/", "FREE_ARGUMENTS: /(?s:.+)/"],
        )
        return MessageGrammar(
            content=f"{CHANNEL}final{MESSAGE}" if header_follows else "",
            before_calls=f"{CHANNEL}commentary{MESSAGE}",
            between=cls.end_token,
            free=free,
            markers=(START, CHANNEL, *ENDS),
        )

    @classmethod
    def _call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        """One call at most: the model ends its answer after a call."""
        constrain, message = map(builder.marker, (CONSTRAIN, MESSAGE))
        rules = builder.named_calls(f'" " {constrain} "json" {message}')
        return CallGrammar(marker=_CALL, body="call", rules=rules)

    def flush(self) -> list[AnswerDelta]:
        held = "".join(self._held)
        if self._state == self._in_message:
            self._deltas.append(self._make_delta(self._matcher.flush()))
        elif self._state == self._in_header and held.lstrip().startswith(TO):
            self._begin_text(held, self._literals.begun)
        elif self._state == self._between and (self._literals.begun or not self._num_messages):
            self._begin_unmarked(self._literals.begun)
        return self._take()

    # --------------------------------------------------------------------------------- states

    def _between(self, text: str, at: int) -> int:
        """Before a message or text: whitespace is dropped if a message follows."""
        start = at
        marker, possible, at = self._literals.push(text, at)
        self._leading_space.append(text[start:at])
        if marker is not None:
            lead = "".join(self._leading_space)
            self._leading_space[:] = [lead.removesuffix(marker)]
            self._on_marker(marker)
        elif not possible:
            self._begin_unmarked(self._literals.begun)
        return at

    def _in_header(self, text: str, at: int) -> int:
        end = at if self._literals.begun else end_of(_HEADER, text, at)
        if end > at:
            self._hold_header(text[at:end])
            return end
        marker, possible, at = self._literals.push(text, at)
        if marker in (CHANNEL, CONSTRAIN):
            self._hold_header(marker)
        elif marker is not None:
            self._on_marker(marker)
        elif not possible:
            self._begin_text("".join(self._held), self._literals.begun)
        return at

    def _in_message(self, text: str, at: int) -> int:
        shown, marker, at = self._matcher.push(text, at)
        self._deltas.append(self._make_delta(shown))
        if marker:
            self._on_marker(marker)
        return at

    def _in_last(self, text: str, at: int) -> int:
        self._deltas.append(self._make_delta(text[at:]))
        return len(text)

    # ---------------------------------------------------------------------------- transitions

    def _on_marker(self, marker: str) -> None:
        """A marker outside of a header; `MESSAGE` ends the header that is held."""
        if marker == MESSAGE:
            self._begin_message("".join(self._held))
        elif marker in ENDS:
            self._begin_between()
        else:
            self._begin_header("".join(self._leading_space) + marker)

    def _begin_between(self) -> None:
        self._held.clear()
        self._leading_space.clear()
        self._literals = LiteralMatcher(TO, START, CHANNEL, MESSAGE, *ENDS)
        self._state = self._between

    def _begin_header(self, text: str) -> None:
        self._held[:] = [text]
        self._leading_space.clear()
        self._num_header_chars = len(text)
        self._literals = LiteralMatcher(*self.markers, skip_space=False)
        self._state = self._in_header

    def _hold_header(self, text: str) -> None:
        self._held.append(text)
        self._num_header_chars += len(text)
        if self._num_header_chars > MAX_HEADER_CHARS:
            self._begin_text("".join(self._held), "")

    def _begin_unmarked(self, begun: str) -> None:
        """The lead ends with `begun`, where text begins instead of a marker."""
        lead = "".join(self._leading_space).removesuffix(begun)
        self._leading_space.clear()
        self._begin_text(lead, begun)

    def _begin_text(self, known: str, rest: str) -> None:
        """Content outside of a message. `known` holds no marker that counts."""
        self._make_delta = Content
        self._deltas.append(Content("".join([*self._leading_space, known])))
        self._begin_body()
        self._read(rest)

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = self._function(recipient[1]) if recipient else ""
        if name:
            self._announce(name)
            index = self._num_calls - 1
            self._make_delta = lambda text: Arguments(index, text)
        else:
            reasons = channel is not None and channel[1] == "analysis"
            self._make_delta = Reasoning if reasons else Content
        self._begin_body()
        if self._ends_with_first and (name or (channel is not None and channel[1] == "final")):
            self._state = self._in_last

    def _begin_body(self) -> None:
        self._held.clear()
        self._leading_space.clear()
        self._num_messages += 1
        self._matcher = Matcher(START, CHANNEL, *ENDS)
        self._state = self._in_message

    def _function(self, recipient: str) -> str:
        """The tool that a message is sent to; empty: none of the client's."""
        if not self._may_call:
            return ""
        name = recipient.removeprefix(_NAMESPACE)
        return name if name != recipient or name in self._tools else ""
