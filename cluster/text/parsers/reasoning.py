r"""Reasoning between two tags at the beginning of an answer.

    \n  <think> \n\n so it is 4. \n </think> \n\n It is 4.
    ╰─ dropped ─────╯╰reasoning─╯╰─── dropped ──╯╰content╯

Whitespace: newlines (`\n`, any number) directly after `<think>`, directly before `</think>` and
directly after it belong to the tags, as in the chat templates of Qwen3 and DeepSeek-R1; so does
whitespace before `<think>`. All other whitespace is text. If the answer ends before `</think>`,
its last newlines are reasoning. Mistral's tags include no newlines.

`<think>` counts only at the beginning of the answer, and only the first `</think>` after it counts:
an answer may mention the tags. A `</think>` without `<think>` is text: the text before it was
already sent as content. It ends reasoning if the prompt has opened it, or if in this format the
answer begins inside; then the opening tag may be repeated.

A tool call ends reasoning that is not closed, from its marker on. Text that only resembles a call,
and a call without a marker, stay reasoning: a model may think about calls. Newlines directly before
the call belong to it. A `</think>` after the call is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from swell.cluster.text.parsers.base import AnswerReader, ContentParser, Parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content, Reasoning, ToolCall
from swell.cluster.text.parsers.text_reader import NotRead, Reading


class ThinkParser(AnswerReader):
    """Parser for models that write `<think>` themselves, or answer without reasoning (Qwen3). If
    the prompt ends with `<think>`, the answer begins inside."""

    start_token, end_token = "<think>", "</think>"
    padding = "\n"

    def __init__(self, make_inner: Callable[[], Parser] = ContentParser, prompt: str = "") -> None:
        """`make_inner` creates the parser of the content. `prompt` is the end of the prompt's
        text."""
        super().__init__()
        self._make_inner = make_inner
        self._inner = make_inner()
        """Parses reasoning up to `end_token`; a new one then parses the content."""
        self.markers = (self.start_token, self.end_token, *self._inner.markers)
        self.keeps_special_tokens |= self._inner.keeps_special_tokens
        self._tag_padding = re.compile(f"[{self.padding}]*" if self.padding else "")
        self._padding: list[str] = []
        """Newlines that may belong to `end_token` or to a call."""
        self._prompt_opened = self.opened_by_prompt(prompt)
        self._has_begun = False
        """Whether reasoning, or an answer without it, has begun."""
        self._is_inside = False

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.start_token.rstrip())

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.end_token)

    def flush(self) -> list[AnswerDelta]:
        if not self._has_begun:
            self.push("")
            self._reading.throw(NotRead())
        if self._is_inside:
            self._reason(self._inner.flush())
            self._deltas.append(Reasoning("".join(self._padding)))
        else:
            self._deltas += self._inner.flush()
        return self._take_deltas()

    def _read(self) -> Reading[None]:
        lead: list[str] = []
        opened = True
        try:
            yield from self._one_of(self.start_token, give=lead.append)
        except NotRead:
            opened = self._prompt_opened
            self._unread("".join(lead))
        self._has_begun = True
        if opened:
            yield from self._through(self._tag_padding)
            yield from self._read_inside()
        yield from self._pass_on(self._inner)

    def _read_inside(self) -> Reading[None]:
        """Reads up to the content or the call after the reasoning."""
        self._inner.stop_at(self.end_token)
        self._is_inside = True
        while self._inner.rest is None:
            self._reason(self._inner.push(self._text[self._at :]))
            self._at = len(self._text)
            if not self._is_inside:
                return
            if self._inner.rest is None:
                yield
        self._at -= len(self._inner.rest)
        # Text that was held back is not a call.
        self._reason(self._inner.flush())
        self._is_inside = False
        self._inner = self._make_inner()
        yield from self._through(self._tag_padding)

    def _reason(self, deltas: list[AnswerDelta]) -> None:
        """Outputs what the inner parser returned: content is reasoning until a call begins."""
        for delta in deltas:
            if isinstance(delta, ToolCall) and self._is_inside:
                self._padding.clear()
                self._is_inside = False
            if isinstance(delta, Content) and self._is_inside:
                self._show(delta.text)
            else:
                self._deltas.append(delta)

    def _show(self, text: str) -> None:
        stripped = text.rstrip(self.padding)
        if stripped:
            self._deltas.append(Reasoning("".join([*self._padding, stripped])))
            self._padding.clear()
        self._padding.append(text[len(stripped) :])


class OpenThinkParser(ThinkParser):
    """Parser for answers that begin inside (DeepSeek-R1), unless the prompt ends with
    `</think>`."""

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return not cls.closed_by_prompt(prompt)


class MistralThinkParser(ThinkParser):
    """Parser for Magistral and Ministral, whose tags are control tokens."""

    start_token, end_token = "[THINK]", "[/THINK]"
    padding = ""
    keeps_special_tokens = True


class GemmaThinkParser(ThinkParser):
    """Parser for Gemma 4's thought channel."""

    start_token, end_token = "<|channel>thought\n", "<channel|>"
    padding = ""
    keeps_special_tokens = True
