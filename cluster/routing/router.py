"""Which engine gets a request: pure, from loads pushed earlier and from what was sent since.

    score(engine) = prompt tokens that it would have to compute
                  + tokens that wait there to be computed
                  + TOKENS_PER_ROW for each request that is there

Prompt tokens to compute are guessed from the names of the blocks that this ingress sent there
before. Among equals a conversation keeps its engine: the tie is broken by a hash of its first
block and the rank, which moves few conversations when engines come and go (rendezvous hashing).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from swell.coordinator.roster import MemberState
from swell.coordinator.wire import ClusterView, EngineReport
from swell.engine.block_hash import extend_block_hashes

TOKENS_PER_ROW = 16
"""What a running request costs a newcomer, in tokens: its rows share every step."""

REMEMBERED_BLOCKS = 65_536
"""Block names kept for each engine; the least recently used are forgotten."""


class NoEngine(RuntimeError):
    """No engine takes requests now."""


class _Engine:
    """What this ingress knows of one engine."""

    def __init__(self) -> None:
        self.report: EngineReport | None = None
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.uncomputed: dict[str, int] = {}
        """Prompt tokens of requests that we sent and that have not answered yet."""
        self.requests = 0
        """Requests that we sent and that have not finished."""

    def cached_blocks(self, names: Sequence[bytes]) -> int:
        for index, name in enumerate(names):
            if name not in self.blocks:
                return index
        return len(names)

    def remember(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > REMEMBERED_BLOCKS:
            self.blocks.popitem(last=False)

    def backlog_tokens(self) -> int:
        """The larger of what the engine told and what we know that we sent: a report is late,
        and ours are not all."""
        report = self.report
        waiting = max(report.waiting_tokens if report else 0, sum(self.uncomputed.values()))
        rows = max(report.running + report.waiting if report else 0, self.requests)
        return waiting + rows * TOKENS_PER_ROW


class Router:
    """Chooses a rank for each request and keeps count of what it chose."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._engines: dict[int, _Engine] = {}
        self._active: list[int] = []
        self._placed: dict[str, tuple[int, _Engine]] = {}
        """The engine itself beside its rank: another one may take the rank of one that died."""

    @property
    def active_ranks(self) -> list[int]:
        return self._active

    def update(self, view: ClusterView) -> None:
        ranks = view.roster.ranks
        self._engines = {rank: self._engines.get(rank) or _Engine() for rank in ranks}
        self._active = [m.rank for m in view.roster.members if m.state is MemberState.ACTIVE]
        for report in view.reports:
            if report.rank in self._engines:
                self._engines[report.rank].report = report

    def choose(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        rank: int | None = None,
    ) -> int:
        """Place a request; `rank` asks for one engine. Raises NoEngine."""
        if rank is not None and rank not in self._active:
            raise NoEngine(f"engine {rank} takes no requests; active: {self._active}")
        if not self._active:
            raise NoEngine("no engine takes requests now")
        names: list[bytes] = []
        extend_block_hashes(names, token_ids, self._block_tokens, salt)
        if rank is None:
            tie = names[0] if names else request_id.encode()
            rank = min(
                self._active, key=lambda r: (self._score(r, len(token_ids), names), _draw(tie, r))
            )
        engine = self._engines[rank]
        cached = engine.cached_blocks(names) * self._block_tokens
        engine.uncomputed[request_id] = max(1, len(token_ids) - cached)
        engine.requests += 1
        engine.remember(names)
        self._placed[request_id] = (rank, engine)
        return rank

    def answered(self, request_id: str) -> None:
        """The prompt of a request was computed."""
        if request_id in self._placed:
            self._placed[request_id][1].uncomputed.pop(request_id, None)

    def done(self, request_id: str) -> None:
        """A request has left its engine, however it ended."""
        self.answered(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            placed[1].requests -= 1

    def rank_of(self, request_id: str) -> int | None:
        placed = self._placed.get(request_id)
        return placed[0] if placed else None

    def placed_on(self, rank: int) -> list[str]:
        return [request_id for request_id, (where, _) in self._placed.items() if where == rank]

    def _score(self, rank: int, tokens: int, names: Sequence[bytes]) -> int:
        engine = self._engines[rank]
        cached = engine.cached_blocks(names) * self._block_tokens
        return tokens - cached + engine.backlog_tokens()


def _draw(key: bytes, rank: int) -> bytes:
    return hashlib.blake2b(key + rank.to_bytes(4, "little"), digest_size=8).digest()
