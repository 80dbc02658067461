"""Base classes of parsers that read an answer while it streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from swell.cluster.text.parsers.deltas import AnswerDelta, Content, merge
from swell.cluster.text.parsers.marker_search import Matcher
from swell.cluster.text.parsers.text_reader import Reading, TextReader


class Parser(ABC):
    """Turns the text of one answer into deltas.

    Invariants, for every text and for every split of it into pieces:

    - The merged deltas are the same for every split.
    - The deltas so far are exactly those that every continuation of the text has in common: nothing
      is taken back, and nothing is held back that is already certain.
    - Unmarked text becomes content, unchanged. So does text that resembles a call and is not one,
      unless its arguments were already sent.
    - The work is linear in the length of the text, for any text.
    """

    markers: tuple[str, ...] = ()
    """Strings that this format must see in the text. If the tokenizer has one of them as a special
    token, the detokenizer must not skip special tokens."""
    keeps_special_tokens: bool = False
    """Whether a marker is a special token in every tokenizer of this format."""

    rest: str | None = None
    """The text after the marker of `stop_at`; None until that marker arrives. Nothing is parsed
    after it."""

    @abstractmethod
    def push(self, text: str) -> list[AnswerDelta]:
        """Adds a piece of text; returns the deltas that are certain now."""

    @abstractmethod
    def flush(self) -> list[AnswerDelta]:
        """Ends the answer; returns the deltas of text that was held back."""

    def stop_at(self, marker: str) -> None:
        """Ends the text that follows at `marker`, unless a call begins first. That text is
        reasoning: a call in it must begin with a marker of a call, not with text that only
        resembles one."""
        raise NotImplementedError


class ReasoningFormat(Protocol):
    """The marks of reasoning, as class attributes of its parser."""

    start_token: str
    end_token: str
    padding: str
    """Characters that belong to an adjacent token."""

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        """Returns whether an answer to this prompt begins inside reasoning."""

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        """Returns whether no reasoning can begin after this prompt."""


class AnswerReader(Parser, TextReader):
    """A parser that reads the parts of an answer in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self._deltas: list[AnswerDelta] = []
        self._later: list[tuple[str, int]] = []
        """Texts to read, the next one last, each with the position to start from."""

    def push(self, text: str) -> list[AnswerDelta]:
        self.read(text)
        while self._later:
            self.read(*self._later.pop())
        return self._take_deltas()

    def _unread(self, text: str) -> None:
        """Reads this text, which was read last, again."""
        self._later.append((self._text, self._at))
        self._text, self._at = text, 0

    def _pass_on(self, parser: Parser) -> Reading[None]:
        """Passes all text that follows to another parser."""
        while True:
            self._deltas += parser.push(self._text[self._at :])
            self._at = len(self._text)
            yield

    def _take_deltas(self) -> list[AnswerDelta]:
        if not self._deltas:
            return []
        deltas, self._deltas = self._deltas, []
        return merge(deltas)


class ContentParser(Parser):
    """Parser of an answer without markers: all of it is content."""

    _end: Matcher | None = None

    def push(self, text: str) -> list[AnswerDelta]:
        shown = text
        if self._end is not None:
            shown, found, at = self._end.push(text, 0)
            if found:
                self.rest = text[at:]
        return [Content(shown)] if shown else []

    def flush(self) -> list[AnswerDelta]:
        held = self._end.flush() if self._end is not None else ""
        return [Content(held)] if held else []

    def stop_at(self, marker: str) -> None:
        self._end = Matcher(marker)
