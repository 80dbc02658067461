"""The state of one engine as an ingress knows it for routing, from load reports and from what it
has sent since. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swell.cluster.client.routing.admission import Backlog, waiting_here
from swell.cluster.client.routing.prefix_index import PrefixIndex
from swell.coordinator.roster import Member
from swell.coordinator.wire import EngineLoad

TOKENS_PER_ROW = 32
"""The cost of a running request for a new one, in tokens: both share every step."""

DEFAULT_TRACKED_BLOCKS = 65_536
"""Number of block hashes kept for an engine that does not report the size of its cache."""

MAX_TRACKED_BLOCKS = 1 << 20
"""Number of block hashes kept for all engines together: about 200 MiB."""

_REPORT_LAG = 2
"""Number of reports after which a request is counted by the engine. The first report after the send
may have been written before the request arrived; the second was not."""


@dataclass(slots=True)
class _Load:
    """The load of a set of requests."""

    uncomputed_tokens: int = 0
    """Tokens of prompts without an output token yet."""
    requests: int = 0
    blocks: int = 0
    """KV blocks filled by their prompts."""
    unanswered: int = 0
    """Requests without a token yet."""

    def add(self, tokens: int, requests: int, blocks: int, unanswered: int) -> None:
        self.uncomputed_tokens += tokens
        self.requests += requests
        self.blocks += blocks
        self.unanswered += unanswered


@dataclass(slots=True)
class Route:
    """The load of one request on the engine chosen for it. It holds the engine and not only the
    rank, since another engine may take the rank of one that died."""

    rank: int
    uncomputed_tokens: int
    _engine: RoutedEngine
    _blocks: int
    _after_report: int
    """Number of reports that had arrived from the engine when the request was sent."""

    def on_first_token(self) -> None:
        """Removes the prompt's tokens from the load: the prompt was computed. May be called
        again."""
        if self.uncomputed_tokens:
            self._engine.add_load(self._after_report, -self.uncomputed_tokens, 0, 0, -1)
            self.uncomputed_tokens = 0

    def release(self) -> None:
        """Removes the request from the load: it has left the engine for any reason. Call this
        once."""
        self.on_first_token()
        self._engine.add_load(self._after_report, 0, -1, -self._blocks, 0)


class RoutedEngine:
    """The state of one incarnation of an engine as this ingress knows it."""

    def __init__(self, member: Member, index: PrefixIndex) -> None:
        """`index` learns which blocks this engine holds."""
        self.rank = member.rank
        self._index = index
        self.incarnation = member.incarnation
        self.num_blocks = member.num_blocks
        self._max_blocks = MAX_TRACKED_BLOCKS
        """Limit on the number of block hashes that are kept."""
        self.load = EngineLoad(member.rank)
        """The newest load report."""
        self._changed_sums: tuple[set[RoutedEngine], ...] = ()
        """Sets to which this engine is added when its backlog changes."""
        self._busy: tuple[int, int] | None = None
        """The cached result of `_busy_now`; None if something has changed since."""
        self.num_reports = 0
        self.blocks: OrderedDict[int, bool] = OrderedDict()
        """The block hashes that are kept, each with whether another block was sent after it. Least
        recently used first, and never a block before its successors: if a block is in the dict, so
        is its whole prefix."""
        self.sent = _Load()
        """The load of all requests that this ingress sent and that have not finished."""
        self.unreported: dict[int, _Load] = {0: _Load()}
        """The part of this load that the newest report does not count, by the number of reports at
        the time of sending."""

    def limit_blocks(self, max_blocks: int) -> None:
        """Keeps at most this many block hashes from now on."""
        self._max_blocks = max_blocks

    def notify(self, changed: set[RoutedEngine]) -> None:
        """Adds this engine to `changed` whenever its backlog changes, from now on."""
        self._changed_sums += (changed,)

    def stop_notifying(self) -> None:
        """Ends what `notify` has begun."""
        self._changed_sums = ()

    def update_load(self, load: EngineLoad) -> None:
        """Applies a load report. A repeated report does not count what was sent since. The same
        holds for a report that an engine repeats during a long step, with only its progress
        changed."""
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
        for changed in self._changed_sums:
            changed.add(self)

    def cached_blocks(self, names: Sequence[int]) -> int:
        """Returns how many blocks of this chain the engine probably has, by binary search."""
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
        """Remembers a chain whose first `known` blocks are remembered already."""
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
        """Returns whether a chain with `known` remembered blocks branches off from a longer
        remembered chain."""
        return 0 < known < len(names) and self.blocks.get(names[known - 1], False)

    def _forget(self) -> None:
        """Keeps only the hashes of blocks that fit into the cache, next to the blocks held by
        requests of other ingresses."""
        limit = DEFAULT_TRACKED_BLOCKS
        if self.num_blocks:
            held = int(self.load.kv_usage * self.num_blocks)
            limit = self.num_blocks - max(0, held - self.sent.blocks)
        self._keep(min(limit, self._max_blocks))

    def _keep(self, limit: int) -> None:
        while len(self.blocks) > limit:
            self._index.discard(self.blocks.popitem(last=False)[0], self.rank)

    def forget_all(self) -> None:
        """Forgets all blocks: the engine has lost its cache, or has left."""
        self._keep(0)

    def add_load(
        self, after_report: int, tokens: int, requests: int, blocks: int, unanswered: int
    ) -> None:
        """Adds to the load of requests that were sent after `after_report` reports; negative
        numbers subtract."""
        self.sent.add(tokens, requests, blocks, unanswered)
        unreported = self.unreported.get(after_report)
        if unreported is not None:
            unreported.add(tokens, requests, blocks, unanswered)
        self._note_change()

    def waiting(self, max_rows: int) -> Backlog:
        """Returns the engine's backlog: what it reported, plus what this ingress sent and it has
        not reported yet."""
        requests = tokens = 0
        for load in self.unreported.values():
            requests += load.unanswered
            tokens += load.uncomputed_tokens
        return waiting_here(self.load, requests, tokens, max_rows)

    def own_waiting(self, max_rows: int) -> Backlog:
        """Returns the backlog of this ingress's own requests at the engine, known only from the
        outputs that came back."""
        sent = self.sent
        waiting = min(sent.unanswered, max(0, sent.requests - max_rows))
        return Backlog(own_requests=waiting, own_tokens=sent.uncomputed_tokens)

    def cost(self, tokens: int, block_tokens: int) -> int:
        """Returns the score of a request with this many uncached prompt tokens, in tokens."""
        busy, free = self._busy = self._busy or self._busy_now()
        return tokens + busy + (max(0, tokens - free * block_tokens) if self.num_blocks else 0)

    def _busy_now(self) -> tuple[int, int]:
        """Returns the part of the score that is the same for each request, and the number of free
        blocks."""
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
