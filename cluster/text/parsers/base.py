"""A parser reads an answer while it streams; a matcher finds its markers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from swell.cluster.text.parsers.deltas import AnswerDelta, Content, merge
from swell.cluster.text.stop_strings import StopAutomaton


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


class StateParser(Parser):
    """A parser that is in one state at a time: a state reads some of a text and returns where the
    next one continues."""

    def __init__(self, state: Callable[[str, int], int]) -> None:
        self._state = state
        self._deltas: list[AnswerDelta] = []

    def push(self, text: str) -> list[AnswerDelta]:
        self._read(text)
        return self._take()

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._state(text, at)

    def _take(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return merge(deltas)


_automaton = lru_cache(maxsize=64)(StopAutomaton)


class Matcher:
    """Finds the first of some markers, and holds back only what may be the beginning of one."""

    def __init__(self, *markers: str) -> None:
        self._automaton = _automaton(markers)
        self._first_char = re.compile("|".join(map(re.escape, sorted({m[0] for m in markers}))))
        self._node = 0
        self._held = ""

    def push(self, text: str, at: int) -> tuple[str, str | None, int]:
        """Read from `text[at:]` up to the end of a marker or of the text.

        Returns what is no marker, the marker if one is complete, and where reading stopped. Of
        two markers that end together it is the longer one.
        """
        start, node, automaton = at, self._node, self._automaton
        while at < len(text):
            if not node:
                found = self._first_char.search(text, at)
                if found is None:
                    at = len(text)
                    break
                at = found.start()
            node = automaton.step(node, text[at])
            at += 1
            marker = automaton.found[node]
            if marker is not None:
                shown = self._held + text[start:at]
                self._node, self._held = 0, ""
                return shown[: -len(marker)], marker, at
        shown = self._held + text[start:at]
        keep = len(shown) - automaton.held[node]
        self._node, self._held = node, shown[keep:]
        return shown[:keep], None, at

    def flush(self) -> str:
        """Nothing follows: what was held is no marker."""
        held, self._node, self._held = self._held, 0, ""
        return held


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
