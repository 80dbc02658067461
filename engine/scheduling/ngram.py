"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of a row's last tokens.
Pure.

Yang et al. 2023, arXiv 2304.04487; `prompt_lookup_num_tokens` in transformers.
"""

from __future__ import annotations

from array import array

from swell.configs.drafts import DraftsConfig
from swell.engine.row_drafts import Proposer
from swell.engine.scheduling.drafter import ProposingDrafter

INDEX_TOKENS = 1 << 15
"""Minimum number of the newest tokens of a row that are indexed; the maximum is twice as many,
which takes some megabytes."""
STEP_TOKENS = 2048
"""Maximum number of tokens that one call adds to the index: takes less than a millisecond."""
MAX_PLACES = 8
"""Maximum number of places that one call compares, the newest first."""
_NOWHERE = -1


class NgramProposer(Proposer):
    """An index of the tokens of one row.

    A place is a position at which a run of `min_match` tokens ends. The index has the newest place
    of each run, and for each place the previous one of the same run. Among the newest places of the
    row's last `min_match` tokens, the one with the longest match, up to `max_match` tokens, is
    used.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._newest: dict[bytes, int] = {}
        self._earlier = array("q")
        """Element i: the previous place of the same run for the place `_first` + i, or
        `_NOWHERE`."""
        self._first = 0
        """The first indexed place."""

    def propose(self, tokens: array[int], count: int) -> list[int]:
        if len(tokens) <= self._min or not self._extend(tokens):
            return []
        end = self._find(tokens)
        if end == _NOWHERE:
            return []
        # A match that overlaps the last tokens is periodic: the found tokens repeat.
        found = tokens[end : end + count].tolist()
        period = len(tokens) - end
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _extend(self, tokens: array[int]) -> bool:
        """Indexes the places up to, but without, the end of `tokens`. Returns False if there were
        too many new ones for one call."""
        last = len(tokens) - 1
        done = self._first + len(self._earlier)
        if not self._earlier or last - self._first > 2 * INDEX_TOKENS:
            self._newest.clear()
            self._earlier = array("q")
            done = self._first = max(self._min, last - INDEX_TOKENS)
        stop = min(last, done + STEP_TOKENS - 1)
        size, newest, earlier = self._min, self._newest, self._earlier
        for end in range(done, stop + 1):
            run = tokens[end - size : end].tobytes()
            earlier.append(newest.get(run, _NOWHERE))
            newest[run] = end
        return stop == last

    def _find(self, tokens: array[int]) -> int:
        """Returns the place after which drafts begin."""
        total = len(tokens)
        place = self._newest.get(tokens[total - self._min :].tobytes(), _NOWHERE)
        best, longest = _NOWHERE, 0
        for _ in range(MAX_PLACES):
            if place == _NOWHERE or longest == self._max:
                break
            length = self._min
            limit = min(self._max, place)
            while length < limit and tokens[place - length - 1] == tokens[total - length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place - self._first]
        return best


class NgramDrafter(ProposingDrafter):
    """Drafts by prompt lookup."""

    def __init__(self, config: DraftsConfig, max_model_len: int, depth: int) -> None:
        super().__init__(
            config, max_model_len, lambda request: NgramProposer(config.min_match, config.max_match)
        )
