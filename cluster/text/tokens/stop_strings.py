"""Stop strings: find where an answer ends, and which of its last characters may not be shown yet.

Invariant: of all stop strings, the one that completes first ends the text; if two complete at the
same character, the one that started first does. Only characters that may still become a stop string
are held back. So the state is that of an Aho-Corasick automaton: its node is the longest suffix of
the text that is a prefix of a stop string, and the node's depth is the number of characters to hold
back.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakValueDictionary


class StopAutomaton:
    """The trie of all stop strings with failure links. Immutable, shared by equal requests."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.found: list[str | None] = [None]
        """Maps a node to the longest stop string that ends there."""
        for stop in stops:
            self._insert(stop)
        self.failure = [0] * len(self.children)
        """Maps a node to the node of its longest proper suffix."""
        self._link()
        self.held = [self._held_at(node) for node in range(len(self.children))]
        """Maps a node to the number of characters that may still become a stop string."""
        self.first_chars = frozenset(self.children[0])

    def step(self, node: int, char: str) -> int:
        while node and char not in self.children[node]:
            node = self.failure[node]
        return self.children[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            following = self.children[node].get(char)
            if following is None:
                following = len(self.children)
                self.children[node][char] = following
                self.children.append({})
                self.depths.append(self.depths[node] + 1)
                self.found.append(None)
            node = following
        self.found[node] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.failure[child] = self.step(self.failure[node], char)
                queue.append(child)
            if self.found[node] is None:
                self.found[node] = self.found[self.failure[node]]

    def _held_at(self, node: int) -> int:
        """Returns the number of characters to hold back: the longest end of the text that more
        characters could turn into a stop string."""
        while node and not self.children[node]:
            node = self.failure[node]
        return self.depths[node]


_automata: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Returns the automaton, which equal requests share while any of them runs. It may be large: a
    node takes about 280 bytes, and one request may have 4096 of them."""
    automaton = _automata.get(stops)
    if automaton is None:
        automaton = _automata[stops] = StopAutomaton(stops)
    return automaton


class StopChecker:
    """Checks one answer's text for stop strings.

    `push` accepts the text of one token and returns the text that may be shown. After a match
    `matched` is the stop string, and all text after it is dropped. If the stop string itself is
    shown, nothing is held back.
    """

    def __init__(
        self, stops: list[str], *, include_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        self.matched: str | None = None
        self._automaton = _automaton(tuple(stops)) if stops else None
        self.include_in_output = include_in_output
        self._min_tokens = min_tokens
        self._node = 0
        self._held = ""

    def push(self, text: str, num_tokens: int) -> str:
        """Adds text. `num_tokens` is the number of the answer's tokens, including the token of
        `text`: a stop string that completes within the first `min_tokens` does not count."""
        automaton, node = self._automaton, self._node
        if automaton is None or (not node and automaton.first_chars.isdisjoint(text)):
            return text
        for index, char in enumerate(text):
            node = automaton.step(node, char)
            stop = automaton.found[node]
            if stop is not None and num_tokens > self._min_tokens:
                return self._match(stop, self._held + text[: index + 1])
        self._node = node
        shown = self._held + text
        if self.include_in_output:
            return shown
        keep = len(shown) - automaton.held[node]
        self._held = shown[keep:]
        return shown[:keep]

    def flush(self) -> str:
        """Ends a text: what was held back is returned, and no stop string matches across this
        position."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _match(self, stop: str, shown: str) -> str:
        self.matched, self._held, self._node = stop, "", 0
        if self.include_in_output:
            return shown
        return shown[: len(shown) - len(stop)]
