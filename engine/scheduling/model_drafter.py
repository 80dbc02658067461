"""Drafts that the workers' draft model has proposed after an earlier step.

    step            computes     proposals      its result
                                 requested
    n               t            2 + 1          u, and the proposals v', w', x'
    n + 1           u                           v    (submitted before step n was read)
    n + 2           v w' x'      4              w x y, and the proposals after y
    n + 3           y ...

A step requests as many proposals as its row can use as drafts if all of its own drafts are
accepted; otherwise the worker makes fewer. A step without drafts requests one more proposal for
each further step that may be in flight, because their tokens come first. No other step requests
proposals for a row until they have arrived. Proposals need room in blocks, like the drafts that
they become.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from swell.configs.drafts import DraftsConfig
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.row_drafts import Proposer
from swell.engine.scheduling.drafter import ProposingDrafter
from swell.engine.scheduling.step_builder import StepBuilder

PATIENCE = 1
"""Consecutive steps without an accepted draft before a row pauses. A draft model is wrong
occasionally, an n-gram lookup for whole passages."""


class ProposedTokens(Proposer):
    """The last proposals of the draft model for one row."""

    __slots__ = ("_begin", "_tokens", "is_awaited")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._begin = 0
        """The position of the first proposed token."""
        self.is_awaited = False
        """Whether a step in flight was asked for the next proposals."""

    def ask(self) -> None:
        """Records that a step in flight was asked for the next proposals."""
        self.is_awaited = True

    def receive(self, proposed: list[int], begin: int) -> None:
        self._tokens, self._begin, self.is_awaited = proposed, begin, False

    def propose(self, tokens: array[int], count: int) -> list[int]:
        """Returns nothing if the row has continued differently, or beyond the proposals."""
        known = len(tokens) - self._begin
        if known > len(self._tokens) or tokens[self._begin :].tolist() != self._tokens[:known]:
            return []
        return self._tokens[known : known + count]


class ModelDrafter(ProposingDrafter):
    patience = PATIENCE

    def __init__(self, config: DraftsConfig, max_model_len: int, depth: int) -> None:
        super().__init__(config, max_model_len, lambda request: ProposedTokens())
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
            # This step's drafts are followed by its new token, then by all proposals but the last.
            places = builder.room_for(request, drafts + count, running, kv) - drafts
            count = min(count, places)
            if count > 0:
                builder.proposals[request.slot] = count
                self._proposed(request).ask()
                room -= min(count, share)
            if room <= 0:
                return

    def on_proposals(self, rows: Sequence[Request], proposals: Mapping[int, list[int]]) -> None:
        for row, proposed in proposals.items():
            request = rows[row]
            if request.drafts is not None:
                self._proposed(request).receive(proposed, len(request.token_ids))

    def _may_ask(self, request: Request, count: int) -> bool:
        """Whether the step samples for the row, and the next step may have drafts for it."""
        total = request.total_tokens
        if request.computed + count != total or request.core.max_tokens == 0:
            return False
        drafts = self._drafts_of(request)
        return total + self._depth >= drafts.resume_at and not self._proposed(request).is_awaited

    def _count(self, request: Request, most_drafts: int) -> int:
        """Returns the number of proposals for a row that may have up to `most_drafts` drafts."""
        drafts, core = self._drafts_of(request), request.core
        length, ahead = drafts.length, self._depth - 1
        if request.num_drafts:
            length, ahead = 2 * request.num_drafts, 0
        to_come = core.max_tokens - request.num_outputs - request.pending
        to_come = min(to_come, self._max_model_len - request.total_tokens)
        # The step samples one of these tokens, and the last one follows the last draft; all
        # proposals after the step's drafts have room in blocks.
        most = min(to_come - 2, to_come - request.num_drafts)
        return min(min(length, self._config.max_tokens, most_drafts) + ahead, most)

    def _proposed(self, request: Request) -> ProposedTokens:
        proposer = self._drafts_of(request).proposer
        assert isinstance(proposer, ProposedTokens)
        return proposer
