"""Which engine gets a request: pure, from the engines' load reports and from what was sent since.

    score(engine) = prompt tokens that it would have to compute
                  + tokens that wait there to be computed
                  + TOKENS_PER_ROW for each request that is there
                  + tokens of the blocks that it lacks, which running rows would lose

The prompt tokens to compute are estimated from the hashes of the blocks that this ingress sent
there before. Scores that differ by at most SLACK_TOKENS are equal. Among equals the longest
cached prefix wins, so a conversation keeps its engine; then a hash of the conversation and the
rank (rendezvous hashing), so that ingresses agree without talking, and an engine that comes or
goes moves only its share.

The hash is of the first block that no engine is known to have: the blocks before it are a
system prompt, which does not identify the conversation. A prompt that leaves a remembered chain
before its end begins a conversation, and its shared prefix counts for little: an engine that lacks
it computes it once for all that follow, and otherwise a new engine would get nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from swell.cluster.client.admission import Backlog, waiting_here
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.wire import ClusterView, EngineReport
from swell.engine.block_hash import extend_block_hashes, pack_tokens

TOKENS_PER_ROW = 32
"""What a running request costs a newcomer, in tokens: its rows share every step."""

SLACK_TOKENS = 256
"""A smaller difference is no reason to leave a cached prefix, or the engine that other ingresses
would choose."""

SHARED_PREFIX_DIVISOR = 4
"""A prefix that other conversations continue counts for this fraction of its tokens."""

DEFAULT_TRACKED_BLOCKS = 65_536
"""Block hashes kept for an engine that does not report the size of its cache."""

_REPORT_LAG = 2
"""A report may have been written before a request that was sent ahead of it arrived; the next one
was not."""


class NoEngine(RuntimeError):
    """No engine takes requests now."""


@dataclass(slots=True)
class _Load:
    """The load of requests."""

    uncomputed_tokens: int = 0
    """Of prompts without an output token yet."""
    requests: int = 0
    blocks: int = 0
    """Filled by their prompts."""
    unanswered: int = 0
    """Requests without a token yet."""

    def add(self, tokens: int, requests: int, blocks: int, unanswered: int) -> None:
        self.uncomputed_tokens += tokens
        self.requests += requests
        self.blocks += blocks
        self.unanswered += unanswered


@dataclass(slots=True)
class Route:
    """One request's load on the engine that was chosen for it: the engine itself beside its rank,
    since another one may take the rank of one that died."""

    rank: int
    uncomputed_tokens: int
    _engine: _Engine
    _blocks: int
    _after_report: int
    """How many reports of the engine had arrived when the request was sent."""

    def on_first_token(self) -> None:
        """The prompt was computed; may be called again."""
        if self.uncomputed_tokens:
            self._engine.add_load(self._after_report, -self.uncomputed_tokens, 0, 0, -1)
            self.uncomputed_tokens = 0

    def release(self) -> None:
        """The request has left the engine, however it ended. Once."""
        self.on_first_token()
        self._engine.add_load(self._after_report, 0, -1, -self._blocks, 0)


class _Engine:
    """What this ingress knows of one incarnation of an engine."""

    def __init__(self, member: Member) -> None:
        self.incarnation = member.incarnation
        self.num_blocks = member.num_blocks
        self.report = EngineReport(member.rank)
        self.num_reports = 0
        self.blocks: OrderedDict[bytes, bool] = OrderedDict()
        """Whether another block was sent behind it. The least recently used first, and a block
        never before those that continue it: the prefix of a block that is here is here too."""
        self.sent = _Load()
        """Of all requests that this ingress sent and that have not finished."""
        self.unreported: dict[int, _Load] = {0: _Load()}
        """The part of it that the report does not count, by the number of reports at its sending.
        """

    def update_report(self, report: EngineReport) -> None:
        """Apply a load report. A report that is repeated does not count what was sent since, nor
        does one that an engine inside a long step repeats with new progress."""
        if self.incarnation not in (0, report.incarnation):
            return
        if replace(report, progress_counter=self.report.progress_counter) == self.report:
            return
        self.report = report
        self.num_reports += 1
        self.unreported[self.num_reports] = _Load()
        self.unreported.pop(self.num_reports - _REPORT_LAG, None)
        self._forget()

    def cached_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """How many blocks of this chain the engine probably has."""
        if not block_hashes or block_hashes[0] not in self.blocks:
            return 0
        known, unknown = 1, len(block_hashes) + 1
        while known + 1 < unknown:
            middle = (known + unknown) // 2
            if block_hashes[middle - 1] in self.blocks:
                known = middle
            else:
                unknown = middle
        return known

    def record_prefix(self, block_hashes: Sequence[bytes], known: int) -> None:
        """Remember a chain of which `known` blocks are remembered already."""
        fresh = block_hashes[known:]
        if fresh:
            self.blocks.update(dict.fromkeys(reversed(fresh), True))
            self.blocks[fresh[-1]] = False
        for block_hash in reversed(block_hashes[:known]):
            self.blocks.move_to_end(block_hash)
        if fresh and known:
            self.blocks[block_hashes[known - 1]] = True
        self._forget()

    def diverges(self, block_hashes: Sequence[bytes], known: int) -> bool:
        """Whether a chain of which `known` blocks are remembered leaves a longer one there."""
        return 0 < known < len(block_hashes) and self.blocks.get(block_hashes[known - 1], False)

    def _forget(self) -> None:
        """Keep what fits into the cache beside the blocks that requests of others hold."""
        limit = DEFAULT_TRACKED_BLOCKS
        if self.num_blocks:
            held = int(self.report.kv_usage * self.num_blocks)
            limit = self.num_blocks - max(0, held - self.sent.blocks)
        while len(self.blocks) > limit:
            self.blocks.popitem(last=False)

    def add_load(
        self, after_report: int, tokens: int, requests: int, blocks: int, unanswered: int
    ) -> None:
        """Add to the load of requests that were sent after so many reports; negative numbers take
        away."""
        self.sent.add(tokens, requests, blocks, unanswered)
        unreported = self.unreported.get(after_report)
        if unreported is not None:
            unreported.add(tokens, requests, blocks, unanswered)

    def waiting(self, max_rows: int) -> Backlog:
        """What waits here: reported, and sent by this ingress and not reported yet."""
        unreported = self.unreported.values()
        return waiting_here(
            self.report,
            sum(load.unanswered for load in unreported),
            sum(load.uncomputed_tokens for load in unreported),
            max_rows,
        )

    def own_waiting(self, max_rows: int) -> Backlog:
        """What waits here of what this ingress has sent, by the outputs that came back alone."""
        sent = self.sent
        waiting = min(sent.unanswered, max(0, sent.requests - max_rows))
        return Backlog(own_requests=waiting, own_tokens=sent.uncomputed_tokens)

    def cost(self, tokens: int, block_tokens: int) -> int:
        """The score of a request with so many uncached prompt tokens here, in tokens."""
        report, sent = self.report, self.sent
        waiting, requests = report.waiting_tokens, report.running + report.waiting
        held = int(report.kv_usage * self.num_blocks)
        for load in self.unreported.values():
            waiting += load.uncomputed_tokens
            requests += load.requests
            held += load.blocks
        waiting = max(waiting, sent.uncomputed_tokens)
        requests = max(requests, sent.requests)
        lacking = 0
        if self.num_blocks:
            free = max(0, self.num_blocks - max(held, sent.blocks))
            lacking = max(0, tokens - free * block_tokens)
        return tokens + waiting + requests * TOKENS_PER_ROW + lacking


class Router:
    """Chooses an engine for each request and counts the load that it adds there."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._engines: dict[int, _Engine] = {}
        self._active: list[int] = []
        self._unreachable: frozenset[int] = frozenset()

    @property
    def active_ranks(self) -> list[int]:
        return [rank for rank in self._active if rank not in self._unreachable]

    def set_unreachable(self, ranks: Iterable[int]) -> None:
        """These engines get no requests."""
        self._unreachable = frozenset(ranks)

    def update(self, view: ClusterView) -> None:
        """Apply the roster and the load reports. An engine that was started again, or whose workers
        are being replaced, has lost its cache."""
        engines: dict[int, _Engine] = {}
        for member in view.roster.members:
            known = self._engines.get(member.rank)
            if known is None or known.incarnation != member.incarnation:
                known = _Engine(member)
            if member.state is MemberState.REPAIRING:
                known.blocks.clear()
            engines[member.rank] = known
        self._engines = engines
        self._active = [m.rank for m in view.roster.members if m.state is MemberState.ACTIVE]
        for report in view.reports:
            if report.rank in engines:
                engines[report.rank].update_report(report)

    def choose(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        rank: int | None = None,
    ) -> Route:
        """Choose an engine, and count the request's load there until the route is released. With
        `rank`, that engine. Raises NoEngine."""
        active = self.active_ranks
        if rank is not None and rank not in active:
            raise NoEngine(f"engine {rank} takes no requests; active: {active}")
        if not active:
            raise NoEngine("no engine takes requests now")
        block_hashes: list[bytes] = []
        extend_block_hashes(block_hashes, pack_tokens(token_ids), self._block_tokens, salt)
        if rank is None:
            rank = self._pick(request_id, len(token_ids), block_hashes)
        engine = self._engines[rank]
        known = engine.cached_blocks(block_hashes)
        cached = known * self._block_tokens
        tokens, blocks = max(1, len(token_ids) - cached), len(block_hashes)
        engine.add_load(engine.num_reports, tokens, 1, blocks, 1)
        engine.record_prefix(block_hashes, known)
        return Route(rank, tokens, engine, blocks, engine.num_reports)

    def backlog(self, max_rows: int) -> Backlog:
        """What waits at all engines, each of which runs `max_rows` requests at once."""
        return _sum(engine.waiting(max_rows) for engine in self._engines.values())

    def own_backlog(self, max_rows: int) -> Backlog:
        """The same where reports are too old: what other ingresses have sent is not known."""
        return _sum(engine.own_waiting(max_rows) for engine in self._engines.values())

    def _pick(self, request_id: str, tokens: int, block_hashes: Sequence[bytes]) -> int:
        """The best engine for a prompt of so many tokens, whose full blocks are `block_hashes`."""
        engines = {rank: self._engines[rank] for rank in self.active_ranks}
        found = {rank: engine.cached_blocks(block_hashes) for rank, engine in engines.items()}
        longest = max(found.values())
        diverges = any(
            blocks == longest and engines[rank].diverges(block_hashes, blocks)
            for rank, blocks in found.items()
        )
        credited_blocks = {
            rank: blocks // SHARED_PREFIX_DIVISOR if diverges else blocks
            for rank, blocks in found.items()
        }
        scores = {
            rank: engine.cost(
                tokens - credited_blocks[rank] * self._block_tokens, self._block_tokens
            )
            for rank, engine in engines.items()
        }
        limit = min(scores.values()) + SLACK_TOKENS
        equals = [rank for rank, score in scores.items() if score <= limit]
        conversation = block_hashes[longest] if longest < len(block_hashes) else request_id.encode()
        if len(equals) == 1:
            return equals[0]
        return min(
            equals,
            key=lambda rank: (
                0 if diverges else -found[rank],
                _rendezvous_hash(conversation, rank),
            ),
        )


def _sum(backlogs: Iterable[Backlog]) -> Backlog:
    columns = zip(*backlogs, strict=True)
    return Backlog(*map(sum, columns))


def _rendezvous_hash(key: bytes, rank: int) -> bytes:
    return hashlib.blake2b(key + rank.to_bytes(4, "little"), digest_size=8).digest()
