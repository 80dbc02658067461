"""Which marker a text has, that comes in pieces: here, or as the first of some."""

from __future__ import annotations

import re
from functools import lru_cache

from swell.cluster.text.stop_strings import StopAutomaton

SPACE = re.compile(r"[ \t\r\n]*")


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run that matches `pattern`, possibly empty, ends."""
    found = pattern.match(text, at)
    assert found is not None, f"{pattern.pattern} must match the empty text"
    return found.end()


class LiteralMatcher:
    """Finds which of some literals the text has here, behind whitespace if `skip_space`. None of
    them begins another."""

    def __init__(self, *literals: str, skip_space: bool = True) -> None:
        self._literals = literals
        self._skip_space = skip_space
        self.begun = ""
        """The beginning of one."""

    def push(self, text: str, at: int) -> tuple[str | None, bool, int]:
        """The literal that is found, whether one may still be, and where reading stopped."""
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
