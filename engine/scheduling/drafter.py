"""Decides which rows of a step have drafts, and how many. Drafts do not change the tokens (see
`worker/draft_verification.py`): they only determine how many tokens a step yields.

A row can have drafts if all of its tokens but the newest are computed. While its drafts are in
flight, it is left out of other steps, since only the device knows how many tokens it has then. The
newest token may itself be in flight, without drafts: then the proposal begins with a guess of that
token, which is not computed again.

Drafts use only spare resources: the remaining token budget, blocks that are free beyond one for
each running request, and tokens up to `drafts.max_step_tokens`, divided among the rows that can use
them. Without room for drafts, a step does not ask for proposals. `engine/row_drafts.py` decides how
many a row would get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from swell.configs.drafts import BY_WORKERS, DraftsConfig
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.row_drafts import Proposer, RowDrafts
from swell.engine.scheduling.step_builder import StepBuilder
from swell.engine.wire import EngineCoreRequest

MakeProposer = Callable[[Request], Proposer]
"""Creates the proposer of a request that has got a slot."""


class Drafter:
    """Base class, and the drafter of an engine without drafts."""

    num_drafts = 0
    """Number of drafts whose step was read, of requests that are still running."""
    num_accepted = 0
    """Number of these drafts that were accepted."""

    def add_drafts(self, builder: StepBuilder, running: int, kv: KVCacheManager) -> None:
        """Adds drafts to rows of the step, and requests proposals for later steps. `running`:
        number of requests with a slot."""

    def on_result(self, request: Request, accepted: int) -> None:
        """Called after the step with the request's drafts was read, and its tokens were added."""

    def on_proposals(self, rows: Sequence[Request], proposals: Mapping[int, list[int]]) -> None:
        """Called after a step was read, and its tokens were added. `proposals`: row of the step ->
        tokens that the draft model proposes after them."""


class ProposingDrafter(Drafter):
    """A drafter with a proposer for each row."""

    patience = 0
    """See `RowDrafts`."""

    def __init__(
        self, config: DraftsConfig, max_model_len: int, make_proposer: MakeProposer
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._make_proposer = make_proposer

    def add_drafts(self, builder: StepBuilder, running: int, kv: KVCacheManager) -> None:
        step_tokens = sum(count for _, count in builder.rows)
        room = min(builder.budget_tokens, self._config.max_step_tokens - step_tokens)
        if room <= 0:
            return
        rows = [request for request, count in builder.rows if self._may_draft(request, count)]
        for index, request in enumerate(rows):
            share = max(1, room // (len(rows) - index))
            drafts = self._propose(request, min(share, room))
            drafts = drafts[: builder.room_for(request, len(drafts), running, kv)]
            if drafts:
                builder.drafts[request.slot] = drafts
                request.num_drafts = len(drafts)
                room -= len(drafts)
                builder.budget_tokens -= len(drafts)
            if room <= 0:
                return

    def on_result(self, request: Request, accepted: int) -> None:
        drafted, request.num_drafts = request.num_drafts, 0
        self.num_drafts += drafted
        self.num_accepted += accepted
        if request.drafts is not None:
            request.drafts.on_result(drafted, accepted, len(request.token_ids))

    def _may_draft(self, request: Request, count: int) -> bool:
        """Whether the row computes only its newest token, and at least one more token may follow
        the next."""
        drafts, total = request.drafts, request.total_tokens
        if count != 1 or request.computed + 1 != total or request.core.max_tokens == 0:
            return False
        return drafts is None or total >= drafts.resume_at

    def _propose(self, request: Request, count: int) -> list[int]:
        """Returns drafts after the newest token, up to one that would finish the answer."""
        drafts = self._drafts_of(request)
        core, pending = request.core, request.pending
        # The last token of an answer is sampled, and so is the token after the last draft.
        most = core.max_tokens - request.num_outputs - pending - 1
        most = min(most, self._max_model_len - request.total_tokens - 1)
        count = min(count, most, drafts.length, self._config.max_tokens)
        if count <= 0:
            return []
        found = drafts.proposer.propose(request.token_ids, pending + count)[pending:]
        return _before_end(found, core)

    def _drafts_of(self, request: Request) -> RowDrafts:
        if request.drafts is None:
            request.drafts = RowDrafts(self._make_proposer(request), self.patience)
        return request.drafts


def _before_end(tokens: list[int], core: EngineCoreRequest) -> list[int]:
    """Cuts the tokens before the first one that would finish the answer: it is sampled anyway, and
    tokens after it are never kept."""
    for index, token in enumerate(tokens):
        if token in core.eos_token_ids or token in core.stop_token_ids:
            return tokens[:index]
    return tokens


DRAFTERS = {
    "ngram": "swell.engine.scheduling.ngram:NgramDrafter",
    **dict.fromkeys(BY_WORKERS, "swell.engine.scheduling.model_drafter:ModelDrafter"),
}
"""`drafts.method` -> "module:Class"."""


def make_drafter(config: DraftsConfig, max_model_len: int, depth: int = 1) -> Drafter:
    """Creates the drafter of `drafts.method`. `max_model_len`: tokens of the longest sequence;
    `depth`: maximum number of steps in flight."""
    if config.method == "none":
        return Drafter()
    module, _, kind = DRAFTERS[config.method].partition(":")
    drafter: Drafter = getattr(import_module(module), kind)(config, max_model_len, depth)
    return drafter
