"""A parser reads an answer while it streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from swell.cluster.text.parsers.deltas import AnswerDelta, Content, merge
from swell.cluster.text.parsers.matching import Matcher
from swell.cluster.text.parsers.reading import Reading, TextReader


class Parser(ABC):
    """Turns the text of one answer into deltas.

    The laws, for every text and however it is cut into pieces:

    - The deltas, merged, are the same for every cut.
    - What is out is exactly what any continuation of the text would bring out: nothing is taken
      back, nothing is held that is already certain.
    - Text that is not marked comes out as content, character by character. So does what
      resembles a call and is none, unless its arguments were already on their way.
    - The work is linear in the length of the text, whatever the text.
    """

    markers: tuple[str, ...] = ()
    """Strings that this format must see in the text. Where the tokenizer has one of them as a
    special token, the detokenizer must not skip special tokens."""
    keeps_special_tokens: bool = False
    """A marker is a special token with every tokenizer of this format."""

    rest: str | None = None
    """What followed the marker of `stop_at`; None until the marker came. Nothing more is read."""

    @abstractmethod
    def push(self, text: str) -> list[AnswerDelta]:
        """The deltas that this piece of text makes certain."""

    @abstractmethod
    def flush(self) -> list[AnswerDelta]:
        """The answer has ended: what was held back comes out as what it is."""

    def stop_at(self, marker: str) -> None:
        """The text that follows ends with `marker`, unless a call begins first. It is reasoning: a
        call in it begins with a marker of its own, not with what only resembles one."""
        raise NotImplementedError


class ReasoningFormat(Protocol):
    """How reasoning is marked: attributes of the class of its parser."""

    start_token: str
    end_token: str
    padding: str
    """Characters that belong to a token beside them."""

    @classmethod
    def opened_by_prompt(cls, prompt: str) -> bool:
        """An answer to this prompt begins inside."""

    @classmethod
    def closed_by_prompt(cls, prompt: str) -> bool:
        """After this prompt no reasoning can begin."""


class AnswerReader(Parser, TextReader):
    """A parser that reads one thing behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self._deltas: list[AnswerDelta] = []
        self._later: list[tuple[str, int]] = []
        """Texts to be read, the next one last, and from where on."""

    def push(self, text: str) -> list[AnswerDelta]:
        self.read(text)
        while self._later:
            self.read(*self._later.pop())
        return self._take_deltas()

    def _unread(self, text: str) -> None:
        """It was read last, and is read again."""
        self._later.append((self._text, self._at))
        self._text, self._at = text, 0

    def _pass_on(self, parser: Parser) -> Reading[None]:
        """All that follows is read by another parser."""
        while True:
            self._deltas += parser.push(self._text[self._at :])
            self._at = len(self._text)
            yield

    def _take_deltas(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return merge(deltas)


class ContentParser(Parser):
    """An answer without markers."""

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
