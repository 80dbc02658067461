"""Rows have drafts that the draft model of the workers has guessed behind an earlier step.

    step            computes     is asked for   reading it gives
    n               t            2 + 1          u, and the guesses v', w', x'
    n + 1           u                           v    (submitted before step n was read)
    n + 2           v w' x'      4              w x y, and the guesses behind y
    n + 3           y ...

A step is asked for as many guesses as its row will have drafts if all of its own are right; the
worker makes fewer where they are not. Without drafts of its own, it is asked for one more for each
step that may be in flight beside it: the tokens of those come first. No other step is asked for a
row until the answer is there. The guesses need places in blocks, as the drafts that they become.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from swell.configs.drafts import DraftsConfig
from swell.engine.drafter import ProposingDrafter
from swell.engine.kv_cache_manager import KVCacheManager
from swell.engine.proposer import Proposer
from swell.engine.request import Request
from swell.engine.step_builder import StepBuilder

PATIENCE = 1
"""A small model is wrong now and then everywhere, while a lookup is wrong in whole passages."""


class GuessedTokens(Proposer):
    """The last guess of the draft model for one row."""

    __slots__ = ("_begin", "_guess", "is_awaited")

    def __init__(self) -> None:
        self._guess: list[int] = []
        self._begin = 0
        """The position of its first token."""
        self.is_awaited = False
        """A step in flight was asked for the next one."""

    def receive(self, guess: list[int], begin: int) -> None:
        self._guess, self._begin, self.is_awaited = guess, begin, False

    def propose(self, tokens: array[int], count: int) -> list[int]:
        """Nothing once the row has gone another way, or past the guess."""
        known = len(tokens) - self._begin
        if known > len(self._guess) or tokens[self._begin :].tolist() != self._guess[:known]:
            return []
        return self._guess[known : known + count]


class ModelDrafter(ProposingDrafter):
    patience = PATIENCE

    def __init__(self, config: DraftsConfig, max_model_len: int, depth: int) -> None:
        super().__init__(config, max_model_len, lambda request: GuessedTokens())
        self._depth = depth

    def add_drafts(self, builder: StepBuilder, running: int, kv: KVCacheManager) -> None:
        super().add_drafts(builder, running, kv)
        room = self._config.max_step_tokens - running
        if room <= 0:
            return
        rows = [request for request, count in builder.rows if self._may_ask(request, count)]
        for index, request in enumerate(rows):
            share = max(1, room // (len(rows) - index))
            drafts, count = request.num_drafts, self._count(request, min(share, room))
            # Behind the drafts of this step comes its new token, then all guesses but the last.
            places = builder.room_for(request, drafts + count, running, kv) - drafts
            count = min(count, places)
            if count > 0:
                builder.proposals[request.slot] = count
                self._guessed(request).is_awaited = True
                room -= min(count, share)
            if room <= 0:
                return

    def on_proposals(self, rows: Sequence[Request], proposals: Mapping[int, list[int]]) -> None:
        for row, guess in proposals.items():
            request = rows[row]
            if request.drafts is not None:
                self._guessed(request).receive(guess, len(request.token_ids))

    def _may_ask(self, request: Request, count: int) -> bool:
        """Whether the step samples for the row, and the next one may have drafts of it."""
        total = request.total_tokens
        if request.computed + count != total or request.core.max_tokens == 0:
            return False
        drafts = self._drafts_of(request)
        return total + self._depth >= drafts.resume_at and not self._guessed(request).is_awaited

    def _count(self, request: Request, most_drafts: int) -> int:
        """Guesses for a row that may have so many drafts."""
        drafts, core = self._drafts_of(request), request.core
        length, ahead = drafts.length, self._depth - 1
        if request.num_drafts:
            length, ahead = 2 * request.num_drafts, 0
        to_come = core.max_tokens - request.num_outputs - request.pending
        to_come = min(to_come, self._max_model_len - request.total_tokens)
        # Of these the step samples one, and the last one follows the last draft; and all that is
        # guessed behind the step's drafts has a place.
        most = min(to_come - 2, to_come - request.num_drafts)
        return min(min(length, self._config.max_tokens, most_drafts) + ahead, most)

    def _guessed(self, request: Request) -> GuessedTokens:
        proposer = self._drafts_of(request).proposer
        assert isinstance(proposer, GuessedTokens)
        return proposer
