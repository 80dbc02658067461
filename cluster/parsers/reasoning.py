r"""Reasoning between `<think>` and `</think>`, at the beginning of an answer.

    \n  <think> \n\n so it is 4. \n </think> \n\n It is 4.
    ╰─ dropped ─────╯╰reasoning─╯╰─── dropped ──╯╰content╯

The rule of whitespace: newlines (`\n`, any number) directly behind `<think>`, directly before
`</think>` and directly behind it belong to the tags, as in the chat templates of Qwen3 and
DeepSeek-R1; so does whitespace before `<think>`. All other whitespace is text. If the answer ends
before `</think>`, its last newlines are reasoning.

`<think>` counts only where the answer begins, and only the first `</think>` behind it: an answer
may speak of the tags.
"""

from __future__ import annotations

import re

from swell.cluster.parsers.base import Matcher, StateParser
from swell.cluster.parsers.parts import Content, Part, Reasoning

OPEN, CLOSE = "<think>", "</think>"

_SPACE = re.compile(r"[ \t\r\n]*")
_NEWLINES = re.compile(r"\n*")


class ThinkParser(StateParser):
    """The model writes `<think>` itself, or answers without reasoning (Qwen3)."""

    open, close = OPEN, CLOSE
    padding = "\n"
    """Characters that belong to a tag beside them."""
    content = ""
    """A marker before what is neither reasoning nor a call."""
    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        super().__init__(self._before)
        self._matcher = Matcher(OPEN)
        self._space: list[str] = []
        """Whitespace before what may be `<think>`."""
        self._newlines = 0
        """Newlines before what may be `</think>`."""

    def flush(self) -> list[Part]:
        if self._state in (self._before, self._opening):
            self._begin_unmarked("".join(self._space) + self._matcher.flush())
        if self._state == self._inside:
            self._parts.append(Reasoning("\n" * self._newlines + self._matcher.flush()))
        return self._take()

    def _before(self, text: str, at: int) -> int:
        end = _space_end(text, at)
        self._space.append(text[at:end])
        if end < len(text):
            self._state = self._opening
        return end

    def _opening(self, text: str, at: int) -> int:
        """At the first character that is not whitespace: `<think>` begins here or nowhere."""
        shown, marker, at = self._matcher.push(text, at)
        if shown:
            rest = (marker or "") + self._matcher.flush()
            self._begin_unmarked("".join(self._space) + shown + rest)
        elif marker:
            self._state = self._after_open
        return at

    def _begin_unmarked(self, text: str) -> None:
        """The answer begins with `text` instead of `<think>`."""
        self._state = self._content
        self._read(text)

    def _after_open(self, text: str, at: int) -> int:
        at = _newlines_end(text, at)
        if at < len(text):
            self._matcher = Matcher(CLOSE)
            self._state = self._inside
        return at

    def _inside(self, text: str, at: int) -> int:
        shown, marker, at = self._matcher.push(text, at)
        stripped = shown.rstrip("\n")
        if stripped:
            self._parts.append(Reasoning("\n" * self._newlines + stripped))
            self._newlines = 0
        self._newlines += len(shown) - len(stripped)
        if marker:
            self._state = self._after_close
        return at

    def _after_close(self, text: str, at: int) -> int:
        at = _newlines_end(text, at)
        if at < len(text):
            self._state = self._content
        return at

    def _content(self, text: str, at: int) -> int:
        self._parts.append(Content(text[at:]))
        return len(text)


class OpenThinkParser(ThinkParser):
    """The chat template has written `<think>` already: the answer begins inside (DeepSeek-R1).

    A model that writes the tag once more is forgiven.
    """

    def _begin_unmarked(self, text: str) -> None:
        self._state = self._after_open
        self._read(text)


def _space_end(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _newlines_end(text: str, at: int) -> int:
    found = _NEWLINES.match(text, at)
    assert found is not None
    return found.end()
