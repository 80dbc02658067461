"""What an ingress knows of one engine, to route by: pure, from load reports and from what was sent
since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swell.cluster.client.admission import Backlog, waiting_here
from swell.cluster.client.prefix_index import PrefixIndex
from swell.coordinator.roster import Member
from swell.coordinator.wire import EngineLoad

TOKENS_PER_ROW = 32
"""What a running request costs a newcomer, in tokens: its rows share every step."""

DEFAULT_TRACKED_BLOCKS = 65_536
"""Names of blocks kept for an engine that does not report the size of its cache."""

MAX_TRACKED_BLOCKS = 1 << 20
"""Names of blocks kept for all engines together: some 200 MiB."""

_REPORT_LAG = 2
"""A report may have been written before a request that was sent ahead of it arrived; the next one
was not."""


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
    _engine: RoutedEngine
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


class RoutedEngine:
    """What this ingress knows of one incarnation of an engine."""

    def __init__(self, member: Member, index: PrefixIndex) -> None:
        """`index` learns what this engine holds."""
        self.rank = member.rank
        self._index = index
        self.incarnation = member.incarnation
        self.num_blocks = member.num_blocks
        self.max_blocks = MAX_TRACKED_BLOCKS
        """Blocks that are remembered, at most."""
        self.load = EngineLoad(member.rank)
        """As it was reported last."""
        self.changed_sums: tuple[set[RoutedEngine], ...] = ()
        """Where it is noted that what waits here has changed."""
        self._busy: tuple[int, int] | None = None
        """See `_busy_now`; None: something has changed since."""
        self.num_reports = 0
        self.blocks: OrderedDict[int, bool] = OrderedDict()
        """Whether another block was sent behind it. The least recently used first, and a block
        never before those that continue it: the prefix of a block that is here is here too."""
        self.sent = _Load()
        """Of all requests that this ingress sent and that have not finished."""
        self.unreported: dict[int, _Load] = {0: _Load()}
        """The part of it that the report does not count, by the number of reports at its sending.
        """

    def update_load(self, load: EngineLoad) -> None:
        """Apply a load report. A report that is repeated does not count what was sent since, nor
        does one that an engine inside a long step repeats with new progress."""
        if load == self.load:
            return
        self.load = load
        self.num_reports += 1
        self.unreported[self.num_reports] = _Load()
        self.unreported.pop(self.num_reports - _REPORT_LAG, None)
        self._note_change()
        self._forget()

    def _note_change(self) -> None:
        self._busy = None
        for changed in self.changed_sums:
            changed.add(self)

    def cached_blocks(self, names: Sequence[int]) -> int:
        """How many blocks of this chain the engine probably has."""
        if not names or names[0] not in self.blocks:
            return 0
        known, unknown = 1, len(names) + 1
        while known + 1 < unknown:
            middle = (known + unknown) // 2
            if names[middle - 1] in self.blocks:
                known = middle
            else:
                unknown = middle
        return known

    def record_prefix(self, names: Sequence[int], known: int) -> None:
        """Remember a chain of which `known` blocks are remembered already."""
        fresh = names[known:]
        if fresh:
            for name in fresh:
                self._index.add(name, self.rank)
            self.blocks.update(dict.fromkeys(reversed(fresh), True))
            self.blocks[fresh[-1]] = False
        for name in reversed(names[:known]):
            self.blocks.move_to_end(name)
        if fresh and known:
            self.blocks[names[known - 1]] = True
        self._forget()

    def diverges(self, names: Sequence[int], known: int) -> bool:
        """Whether a chain of which `known` blocks are remembered leaves a longer one there."""
        return 0 < known < len(names) and self.blocks.get(names[known - 1], False)

    def _forget(self) -> None:
        """Keep what fits into the cache beside the blocks that requests of others hold."""
        limit = DEFAULT_TRACKED_BLOCKS
        if self.num_blocks:
            held = int(self.load.kv_usage * self.num_blocks)
            limit = self.num_blocks - max(0, held - self.sent.blocks)
        self._keep(min(limit, self.max_blocks))

    def _keep(self, limit: int) -> None:
        while len(self.blocks) > limit:
            self._index.discard(self.blocks.popitem(last=False)[0], self.rank)

    def forget_all(self) -> None:
        """It has lost its cache, or has left."""
        self._keep(0)

    def add_load(
        self, after_report: int, tokens: int, requests: int, blocks: int, unanswered: int
    ) -> None:
        """Add to the load of requests that were sent after so many reports; negative numbers take
        away."""
        self.sent.add(tokens, requests, blocks, unanswered)
        unreported = self.unreported.get(after_report)
        if unreported is not None:
            unreported.add(tokens, requests, blocks, unanswered)
        self._note_change()

    def waiting(self, max_rows: int) -> Backlog:
        """What waits here: reported, and sent by this ingress and not reported yet."""
        requests = tokens = 0
        for load in self.unreported.values():
            requests += load.unanswered
            tokens += load.uncomputed_tokens
        return waiting_here(self.load, requests, tokens, max_rows)

    def own_waiting(self, max_rows: int) -> Backlog:
        """What waits here of what this ingress has sent, by the outputs that came back alone."""
        sent = self.sent
        waiting = min(sent.unanswered, max(0, sent.requests - max_rows))
        return Backlog(own_requests=waiting, own_tokens=sent.uncomputed_tokens)

    def cost(self, tokens: int, block_tokens: int) -> int:
        """The score of a request with so many uncached prompt tokens here, in tokens."""
        busy, free = self._busy = self._busy or self._busy_now()
        return tokens + busy + (max(0, tokens - free * block_tokens) if self.num_blocks else 0)

    def _busy_now(self) -> tuple[int, int]:
        """The part of the score that is the same for each request, and the free blocks."""
        report, sent = self.load, self.sent
        waiting, requests = report.waiting_tokens, report.running + report.waiting
        held = int(report.kv_usage * self.num_blocks)
        for load in self.unreported.values():
            waiting += load.uncomputed_tokens
            requests += load.requests
            held += load.blocks
        waiting = max(waiting, sent.uncomputed_tokens)
        requests = max(requests, sent.requests)
        free = max(0, self.num_blocks - max(held, sent.blocks))
        return waiting + requests * TOKENS_PER_ROW, free
