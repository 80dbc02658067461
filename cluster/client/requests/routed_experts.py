"""The experts that computed the tokens of one answer, from engine outputs to the client."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.worker.sampler_wire import Extra, RoutedExperts


class RoutedExpertsTable(msgspec.Struct, frozen=True):
    """The experts of the first tokens of prompt and answer, in order."""

    num_tokens: int
    layers: list[int]
    """Indices of the model's layers that have experts."""
    top_k: int
    """Number of experts of a token in a layer; `data` has the best first."""
    wide: bool
    """Whether an expert's number has two bytes, little-endian; otherwise it has one."""
    data: bytes
    """Shape [num_tokens, layers, top_k]."""


class RoutedExpertsCollector:
    """Collects the experts that engines report as they compute positions. A later attempt reports
    all positions again. If a position is reported twice, the last report counts: the KV of the
    following positions was computed with it."""

    def __init__(self) -> None:
        self._last: RoutedExperts | None = None
        self._data = bytearray()

    def add(self, extras: Sequence[Extra]) -> None:
        """Adds reports. Raises ValueError if positions before a report are missing."""
        for extra in extras:
            if isinstance(extra, RoutedExperts):
                begin = extra.start * extra.token_bytes
                if begin > len(self._data):
                    known = len(self._data) // extra.token_bytes
                    raise ValueError(
                        f"an engine returned the experts from token {extra.start} on, but those "
                        f"of {known} tokens are known"
                    )
                self._data[begin : begin + len(extra.data)] = extra.data
                self._last = extra

    def table(self, num_tokens: int) -> RoutedExpertsTable | None:
        """Returns the table of the first `num_tokens` tokens, or of as many as are known; None if
        none are."""
        if self._last is None:
            return None
        last = self._last
        num_tokens = min(num_tokens, len(self._data) // last.token_bytes)
        data = bytes(self._data[: num_tokens * last.token_bytes])
        return RoutedExpertsTable(num_tokens, last.layers, last.top_k, last.wide, data)
