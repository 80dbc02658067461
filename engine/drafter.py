"""Which rows of a step have drafts, and how many. The tokens stay the same (see
`worker/drafts.py`): drafts decide only how many of them a step gives.

A row has drafts where all of its tokens are computed but the newest. While they are in flight it
has no row in other steps, since only the device knows how many tokens it has then. Its newest token
may itself be in flight, without drafts: then the proposal begins with a guess of that token, which
is not computed again.

Drafts take nothing from others: the budget that all rows have left, blocks that are free beyond one
for each running request, and tokens up to `drafts.max_step_tokens`, divided among the rows that can
use them. With more rows than that, none has drafts and no proposal is made.

A row begins with FIRST_LENGTH drafts. If all are right it gets twice as many next time, else one
more than were right. If none is right in more steps than the patience of its method allows, one
after the other, it has none for a while: for FIRST_PAUSE tokens, and for twice as many each time
until one is right again, up to MAX_DOUBLINGS times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from swell.configs.drafts import BY_WORKERS, DraftsConfig
from swell.engine.kv_cache_manager import KVCacheManager
from swell.engine.proposer import MakeProposer, Proposer
from swell.engine.request import Request
from swell.engine.step_builder import StepBuilder
from swell.engine.wire import EngineCoreRequest

FIRST_LENGTH = 3
FIRST_PAUSE = 4
MAX_DOUBLINGS = 5


class RowDrafts:
    """What a request knows about its drafts while it runs."""

    __slots__ = ("length", "misses", "patience", "proposer", "resume_at")

    def __init__(self, proposer: Proposer, patience: int = 0) -> None:
        """`patience`: steps in a row whose drafts may all be wrong before it has none."""
        self.proposer, self.patience = proposer, patience
        self.length = FIRST_LENGTH
        self.misses = 0
        """Steps in a row whose drafts were all wrong."""
        self.resume_at = 0
        """No drafts before it has so many tokens."""

    def on_result(self, drafted: int, accepted: int, total_tokens: int) -> None:
        """A step has accepted some of its drafts; it has `total_tokens` now."""
        if accepted:
            self.misses = 0
            self.length = 2 * drafted if accepted == drafted else accepted + 1
            return
        self.length = 1
        doublings = self.misses - self.patience
        if doublings >= 0:
            self.resume_at = total_tokens + (FIRST_PAUSE << doublings)
        self.misses = min(self.misses + 1, self.patience + MAX_DOUBLINGS)


class Drafter:
    """This base is for an engine without drafts."""

    num_drafts = 0
    """Drafts whose step was read, of requests that still run."""
    num_accepted = 0
    """Those of them that were right."""

    def add_drafts(self, builder: StepBuilder, running: int, kv: KVCacheManager) -> None:
        """Give drafts to rows of the step, and ask for those of later ones; `running`: requests
        that have a slot."""

    def on_result(self, request: Request, accepted: int) -> None:
        """The step with the request's drafts was read, and its tokens are added."""

    def on_proposals(self, rows: Sequence[Request], proposals: Mapping[int, list[int]]) -> None:
        """A step was read, and its tokens are added; `proposals`: row of the step -> what the draft
        model guesses behind them."""


class ProposingDrafter(Drafter):
    """Rows have drafts by a proposer of each."""

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
        """Whether the row computes its newest token alone, with at least one to follow the next."""
        drafts, total = request.drafts, request.total_tokens
        if count != 1 or request.computed + 1 != total or request.core.max_tokens == 0:
            return False
        return drafts is None or total >= drafts.resume_at

    def _propose(self, request: Request, count: int) -> list[int]:
        """Drafts behind the newest token, up to one that would end the answer."""
        drafts = self._drafts_of(request)
        core, pending = request.core, request.pending
        # The last token of an answer is sampled, and so is what follows the last draft.
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
    """Up to the first that would end the answer: what follows it is never kept, and it is sampled
    anyway."""
    for index, token in enumerate(tokens):
        if token in core.eos_token_ids or token in core.stop_token_ids:
            return tokens[:index]
    return tokens


DRAFTERS = {
    "ngram": "swell.engine.ngram:NgramDrafter",
    **dict.fromkeys(BY_WORKERS, "swell.engine.model_drafter:ModelDrafter"),
}
"""By `drafts.method` -> "module:Class"."""


def make_drafter(config: DraftsConfig, max_model_len: int, depth: int = 1) -> Drafter:
    """`max_model_len`: tokens of the longest sequence; `depth`: most steps in flight."""
    if config.method == "none":
        return Drafter()
    module, _, kind = DRAFTERS[config.method].partition(":")
    drafter: Drafter = getattr(import_module(module), kind)(config, max_model_len, depth)
    return drafter
