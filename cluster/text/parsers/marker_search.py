"""Finds markers in text that arrives in pieces: at the current position, or the first one of
several."""

from __future__ import annotations

import re
from functools import lru_cache

from swell.cluster.text.tokens.stop_strings import StopAutomaton

SPACE = re.compile(r"[ \t\r\n]*")


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns where a run that matches `pattern`, possibly empty, ends."""
    found = pattern.match(text, at)
    assert found is not None, f"{pattern.pattern} must match the empty text"
    return found.end()


class LiteralMatcher:
    """Finds which one of several literals the text has at the current position, after whitespace
    if `skip_space`. None of them may be a prefix of another."""

    def __init__(self, *literals: str, skip_space: bool = True) -> None:
        self._literals = literals
        self._skip_space = skip_space
        self.begun = ""
        """The matched beginning of a literal."""

    def push(self, text: str, at: int) -> tuple[str | None, bool, int]:
        """Returns the literal that was found, whether one may still be found, and where reading
        stopped."""
        begun = self.begun
        if not begun and self._skip_space:
            at = end_of(SPACE, text, at)
        if at == len(text):
            return None, True, at
        for literal in self._literals:
            missing = len(literal) - len(begun)
            longer = begun + text[at : at + missing]
            if longer == literal:
                self.begun = ""
                return literal, True, at + missing
            if literal.startswith(longer):
                self.begun = longer
                return None, True, len(text)
        while any(literal.startswith(begun + text[at]) for literal in self._literals):
            begun += text[at]
            at += 1
        self.begun = begun
        return None, False, at

    def give_back(self) -> str:
        """Returns the matched beginning, which belongs to no literal, and begins again."""
        begun, self.begun = self.begun, ""
        return begun


_automaton = lru_cache(maxsize=64)(StopAutomaton)


class Matcher:
    """Finds the first of several markers, and holds back only text that may be the beginning of
    one."""

    def __init__(self, *markers: str) -> None:
        self._automaton = _automaton(markers)
        self._first_char = re.compile("|".join(map(re.escape, sorted({m[0] for m in markers}))))
        self._node = 0
        self._held = ""

    def push(self, text: str, at: int) -> tuple[str, str | None, int]:
        """Reads from `text[at:]` up to the end of a marker or of the text.

        Returns the text without a marker, the marker if one is complete, and where reading stopped.
        If two markers end at the same position, it is the longer one.
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
        """Ends the text; returns what was held back, which is not a marker."""
        held, self._node, self._held = self._held, 0, ""
        return held
