"""Answers of gpt-oss: messages in channels, in one format for reasoning and calls.

    <|channel|>analysis<|message|>so it is 4.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 4.<|return|>

The prompt ends with `<|start|>assistant`, or later in a message. `to=` may precede the channel. A
message to `functions.NAME`, or to a tool of the request, is a call with the message as its
arguments. Other messages are reasoning in the channel `analysis`, and content in all other
channels. Headers are markup: they are dropped, even if the answer breaks off in one, unless they
are not valid headers. Text outside of messages is content. A call in an answer that may not have
calls is content.

Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from swell.cluster.text.parsers.answer_grammar import MessageGrammar
from swell.cluster.text.parsers.deltas import AnswerDelta, Arguments, Content, Reasoning, Tool
from swell.cluster.text.parsers.grammar import CallGrammar, GrammarBuilder, marker_expression
from swell.cluster.text.parsers.marker_search import Matcher
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.parsers.tool_parser import ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
ENDS = ("<|end|>", "<|call|>", RETURN)
TO = "to="
MAX_HEADER_CHARS = 400

_HEADER = re.compile(r"[-+\w.:/= \t]*")
_ANYTHING = re.compile(r"(?s:.*)")
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
    """`start_token`, `end_token` and `padding` are the marks of reasoning after the prompt, as a
    grammar writes them."""

    def __init__(
        self,
        make_id: Callable[[], str] | None = None,
        tools: Sequence[Tool] | None = (),
        prompt: str = "",
        constrained: bool = False,
    ) -> None:
        """`tools` is None if calls are not allowed. `prompt` is the end of the prompt's text, which
        may have begun a message. `constrained` means that a grammar ends the answer with its first
        content or call in the right channel, so no text in that message is a marker."""
        super().__init__(make_id, tools or ())
        self._may_call = tools is not None
        self._ends_with_first = False
        self._make_delta: Callable[[str], AnswerDelta] = Content
        self._matcher = Matcher(START, CHANNEL, *ENDS)
        self._in_body = False
        self._is_last = False
        """Whether no text in the message is a marker."""
        self._num_header_chars = 0
        self._num_messages = 0
        """Number of messages that have begun, and of texts outside of messages."""
        _, found, begun = prompt.rpartition(START)
        if found and begun != "assistant":
            self.push(START + begun)
        self._ends_with_first = constrained

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return prompt.endswith(cls.start_token)

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        return not prompt.endswith(_ASSISTANT)

    @classmethod
    def messages(cls, prompt: str, special: Mapping[str, int]) -> MessageGrammar:
        """Returns the grammar of the messages that follow this prompt."""
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
    def call_grammar(cls, builder: GrammarBuilder) -> CallGrammar:
        """Returns a grammar of at most one call: the model ends its answer after a call."""
        constrain, message = map(builder.marker, (CONSTRAIN, MESSAGE))
        rules = builder.named_calls(f'" " {constrain} "json" {message}')
        return CallGrammar(marker=_CALL, body="call", rules=rules)

    def flush(self) -> list[AnswerDelta]:
        held, begun = "".join(self._held), self._literals.begun
        if self._in_body:
            self._deltas.append(self._make_delta(self._matcher.flush()))
        elif held.lstrip().startswith(TO):
            self._begin_text(held + self._matcher.push(begun, 0)[0])
        elif not held and (begun or not self._num_messages):
            lead = "".join(self._leading_space).removesuffix(begun)
            self._begin_text(lead + self._matcher.push(begun, 0)[0])
        return self._take_deltas()

    # --------------------------------------------------------------------------------- reading

    def _read(self) -> Reading[None]:
        marker = ENDS[0]
        while True:
            self._in_body = False
            if marker in ENDS:
                self._held.clear()
                self._leading_space.clear()
                marker = yield from self._read_between()
            elif marker == MESSAGE:
                self._begin_message("".join(self._held))
                marker = yield from self._read_body()
            else:
                marker = yield from self._read_header(marker)

    def _read_between(self) -> Reading[str]:
        """Reads the text before a message or other text. Whitespace is dropped if a message
        follows."""
        marker = yield from self._read_end_marker(TO, START, CHANNEL, MESSAGE, *ENDS)
        if marker:
            return marker
        self._begin_text("".join(self._leading_space))
        return (yield from self._read_body())

    def _read_header(self, marker: str) -> Reading[str]:
        """Reads a header; returns the marker that ends it."""
        lead = "".join(self._leading_space) or marker
        self._leading_space.clear()
        self._held.clear()
        self._num_header_chars = 0
        try:
            self._hold_header(lead)
            while True:
                yield from self._through(_HEADER, self._hold_header)
                marker = yield from self._one_of(*self.markers, skip_space=False)
                if marker not in (CHANNEL, CONSTRAIN):
                    return marker
                self._hold_header(marker)
        except NotRead as error:
            self._begin_text("".join(self._held))
            self._unread(error.unread)
        return (yield from self._read_body())

    def _read_body(self) -> Reading[str]:
        """Reads a message; returns the marker that ends it."""

        def give(text: str) -> None:
            self._deltas.append(self._make_delta(text))

        if self._is_last:
            yield from self._through(_ANYTHING, give)
        return (yield from self._up_to(self._matcher, give))

    def _hold_header(self, text: str) -> None:
        self._held.append(text)
        self._num_header_chars += len(text)
        if self._num_header_chars > MAX_HEADER_CHARS:
            raise NotRead

    def _begin_text(self, known: str) -> None:
        """Begins content outside of a message. `known` contains no effective marker."""
        self._make_delta = Content
        self._deltas.append(Content(known))
        self._begin_body()

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
        final = channel is not None and channel[1] == "final"
        self._is_last = self._ends_with_first and (bool(name) or final)

    def _begin_body(self) -> None:
        self._held.clear()
        self._leading_space.clear()
        self._num_messages += 1
        self._in_body = True

    def _function(self, recipient: str) -> str:
        """Returns the tool that a message is sent to; empty if it is not a tool of the client."""
        if not self._may_call:
            return ""
        name = recipient.removeprefix(_NAMESPACE)
        return name if name != recipient or name in self._tools else ""
