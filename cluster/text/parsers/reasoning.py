r"""Reasoning between two tags, at the beginning of an answer.

    \n  <think> \n\n so it is 4. \n </think> \n\n It is 4.
    ╰─ dropped ─────╯╰reasoning─╯╰─── dropped ──╯╰content╯

The rule of whitespace: newlines (`\n`, any number) directly after `<think>`, directly before
`</think>` and directly after it belong to the tags, as in the chat templates of Qwen3 and
DeepSeek-R1; so does whitespace before `<think>`. All other whitespace is text. If the answer ends
before `</think>`, its last newlines are reasoning. Mistral's tags have no newlines of their own.

`<think>` counts only where the answer begins, and only the first `</think>` after it: an answer
may mention the tags. A `</think>` without `<think>` is text: what precedes it was shown as content
already. It ends reasoning where the prompt has opened it, or where the format says that the answer
begins inside; there the tag may be written once more.

A tool call ends reasoning that is not closed, from its marker on. What only resembles a call, and
a call without a marker, stay reasoning: a model may think about calls. Newlines directly before the
call belong to it. A `</think>` after the call is text.
"""

from __future__ import annotations

from collections.abc import Callable

from swell.cluster.text.parsers.base import ContentParser, Parser, StateParser
from swell.cluster.text.parsers.calls import LiteralMatcher
from swell.cluster.text.parsers.deltas import AnswerDelta, Content, Reasoning, ToolCall


class ThinkParser(StateParser):
    """The model writes `<think>` itself, or answers without reasoning (Qwen3). Where the prompt
    ends with `<think>`, the answer begins inside."""

    start_token, end_token = "<think>", "</think>"
    padding = "\n"

    def __init__(self, make_inner: Callable[[], Parser] = ContentParser, prompt: str = "") -> None:
        """`make_inner` makes what reads the content. `prompt`: the end of the prompt's text."""
        super().__init__(self._before)
        self._make_inner = make_inner
        self._inner = make_inner()
        """Reads reasoning up to `end_token`, and another one the content after it."""
        self.markers = (self.start_token, self.end_token, *self._inner.markers)
        self.keeps_special_tokens |= self._inner.keeps_special_tokens
        self._literals = LiteralMatcher(self.start_token)
        self._lead: list[str] = []
        """What may be whitespace and `start_token`."""
        self._padding: list[str] = []
        """Before what may be `end_token` or a call."""
        self._prompt_opened = self.opened_by_prompt(prompt)

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.start_token.rstrip())

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.end_token)

    def flush(self) -> list[AnswerDelta]:
        if self._state == self._before:
            self._begin_unmarked()
        if self._state == self._inside:
            self._reason(self._inner.flush())
            self._deltas.append(Reasoning("".join(self._padding)))
        else:
            self._deltas += self._inner.flush()
        return self._take()

    def _before(self, text: str, at: int) -> int:
        """Behind whitespace `start_token` is first, or reasoning does not begin at all."""
        start = at
        found, possible, at = self._literals.push(text, at)
        self._lead.append(text[start:at])
        if found:
            self._state = self._after_open
        elif not possible:
            self._begin_unmarked()
        return at

    def _begin_unmarked(self) -> None:
        """The answer begins with other text."""
        self._state = self._after_open if self._prompt_opened else self._content
        self._read("".join(self._lead))

    def _after_open(self, text: str, at: int) -> int:
        at = self._padding_end(text, at)
        if at < len(text):
            self._inner.stop_at(self.end_token)
            self._state = self._inside
        return at

    def _inside(self, text: str, at: int) -> int:
        self._reason(self._inner.push(text[at:]))
        rest = self._inner.rest
        if rest is None:
            return len(text)
        # What was held is no call.
        self._reason(self._inner.flush())
        self._padding.clear()
        self._inner = self._make_inner()
        self._state = self._after_close
        return len(text) - len(rest)

    def _reason(self, deltas: list[AnswerDelta]) -> None:
        """What the inner parser has read is reasoning until a call begins."""
        for delta in deltas:
            if isinstance(delta, ToolCall) and self._state == self._inside:
                self._padding.clear()
                self._state = self._content
            if isinstance(delta, Content) and self._state == self._inside:
                self._show(delta.text)
            else:
                self._deltas.append(delta)

    def _show(self, text: str) -> None:
        stripped = text.rstrip(self.padding)
        if stripped:
            self._deltas.append(Reasoning("".join([*self._padding, stripped])))
            self._padding.clear()
        self._padding.append(text[len(stripped) :])

    def _after_close(self, text: str, at: int) -> int:
        at = self._padding_end(text, at)
        if at < len(text):
            self._state = self._content
        return at

    def _content(self, text: str, at: int) -> int:
        self._deltas += self._inner.push(text[at:])
        return len(text)

    def _padding_end(self, text: str, at: int) -> int:
        return len(text) - len(text[at:].lstrip(self.padding))


class OpenThinkParser(ThinkParser):
    """The answer begins inside (DeepSeek-R1), unless the prompt ends with `</think>`."""

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        return not cls.closed_by_prompt(prompt)


class MistralThinkParser(ThinkParser):
    """Magistral's and Ministral's, whose tags are control tokens."""

    start_token, end_token = "[THINK]", "[/THINK]"
    padding = ""
    keeps_special_tokens = True


class GemmaThinkParser(ThinkParser):
    """Gemma 4's channel of thoughts."""

    start_token, end_token = "<|channel>thought\n", "<channel|>"
    padding = ""
    keeps_special_tokens = True
