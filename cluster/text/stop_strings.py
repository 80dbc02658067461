"""Stop strings: where an answer ends, and which of its last characters may not be shown yet.

The law: of all stops, the one that completes first ends the text; of two that complete at the
same character, the one that started first. Only characters that may still become a stop are
held back, so the state is that of an Aho-Corasick automaton: its node is the longest end of the
text that begins some stop, and the depth of that node is what is held.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakValueDictionary


class StopAutomaton:
    """The trie of all stops with failure links. Immutable, shared by equal requests."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.found: list[str | None] = [None]
        """node -> the longest stop that ends here."""
        for stop in stops:
            self._insert(stop)
        self.failure = [0] * len(self.children)
        """node -> node of its longest proper suffix."""
        self._link()
        self.held = [self._held_at(node) for node in range(len(self.children))]
        """node -> characters that may still become a stop."""
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
        """A complete stop that no longer one continues is not held: its suffixes may be."""
        while node and not self.children[node]:
            node = self.failure[node]
        return self.depths[node]


_automata: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Equal requests share one while any of them runs. It may be large: a node is some 280 bytes,
    and one request may have 4096 of them."""
    automaton = _automata.get(stops)
    if automaton is None:
        automaton = _automata[stops] = StopAutomaton(stops)
    return automaton


class StopChecker:
    """One answer's text against its stop strings.

    `push` takes the text of one token and gives what may be shown. After a match `matched` names
    the stop, and everything after it is dropped. Nothing is held where the stop itself is shown.
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
        """`num_tokens` counts the answer's tokens including the one that brought `text`: a stop
        that completes within the first `min_tokens` does not count."""
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
        """The text has ended: what was held is text, and no stop reaches across this place."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _match(self, stop: str, shown: str) -> str:
        self.matched, self._held, self._node = stop, "", 0
        if self.include_in_output:
            return shown
        return shown[: len(shown) - len(stop)]
