"""The experts that computed the tokens of one answer, on their way from engines to its client."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.worker.sample.wire import Extra, RoutedExperts


class RoutedExpertsTable(msgspec.Struct, frozen=True):
    """Of the first tokens of prompt and answer, in order."""

    num_tokens: int
    layers: list[int]
    """The model's layers that have experts."""
    top_k: int
    """Experts of a token in a layer, best first."""
    wide: bool
    """An expert's number has two bytes, little-endian; else one."""
    data: bytes
    """[num_tokens, layers, top_k]"""


class RoutedExpertsCollector:
    """Engines report positions as they compute them. A later attempt reports all again, and where
    a position comes again, its last choices count: with them the KV of what follows is computed."""

    def __init__(self) -> None:
        self._last: RoutedExperts | None = None
        self._data = bytearray()

    def add(self, extras: Sequence[Extra]) -> None:
        """Raises ValueError if positions are missing before a report."""
        for extra in extras:
            if isinstance(extra, RoutedExperts):
                begin = extra.start * extra.token_bytes
                if begin > len(self._data):
                    known = len(self._data) // extra.token_bytes
                    raise ValueError(
                        f"an engine gave the experts of token {extra.start}, and {known} are known"
                    )
                self._data[begin : begin + len(extra.data)] = extra.data
                self._last = extra

    def table(self, num_tokens: int) -> RoutedExpertsTable | None:
        """Of so many tokens, or as many as are known; None: of none."""
        if self._last is None:
            return None
        last = self._last
        num_tokens = min(num_tokens, len(self._data) // last.token_bytes)
        data = bytes(self._data[: num_tokens * last.token_bytes])
        return RoutedExpertsTable(num_tokens, last.layers, last.top_k, last.wide, data)
