"""Choice of the engine for a request, from the engines' load reports and from what was sent since.
Pure.

    score(engine) = prompt tokens that it would have to compute
                  + tokens that wait there to be computed
                  + TOKENS_PER_ROW for each request that is there
                  + tokens of the blocks that it lacks, which running rows would lose

The lowest score wins. The prompt tokens to compute are estimated from the hashes of the blocks that
this ingress sent to the engine before. Scores that differ by at most SLACK_TOKENS count as equal.
Among equal engines the longest cached prefix wins, so a conversation keeps its engine. If this
decides nothing, a hash of the conversation and the rank does (rendezvous hashing). So ingresses
agree without communication, and an engine that joins or leaves moves only its own share.

The hashed block is the first one that no engine is known to have: the blocks before it are a system
prompt, which does not identify the conversation. A prompt that branches off from a remembered chain
begins a new conversation, and the shared prefix gets a low weight: an engine that lacks it computes
it once for all that follow. Otherwise a new engine would never get a request.

If there are many engines, only some are scored, so that the cost of a choice does not depend on
their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.routing.admission import Backlog
from swell.cluster.client.routing.prefix_index import PrefixIndex, PromptBlocks
from swell.cluster.client.routing.routable_engines import Candidates, Role, RoutableEngines
from swell.cluster.client.routing.routed_engine import MAX_TRACKED_BLOCKS, Route, RoutedEngine
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.wire import ClusterView, EngineLoad
from swell.engine.wire import PrefixHint

SLACK_TOKENS = 256
"""A smaller difference of scores is not a reason to leave a cached prefix, or the engine that other
ingresses would choose."""

SHARED_PREFIX_DIVISOR = 4
"""A prefix that other conversations continue counts for this fraction of its tokens."""

MAX_SCORED = 64
"""Up to this many engines, each engine is scored for each request."""

CONSIDERED = 16
"""With more engines, those that hold the longest prefix and neighbours on the hash ring are scored,
at most this many of each. Both depend only on the conversation. The least loaded engines would be a
bad choice: all ingresses would choose the same ones until the next report."""

_KEY_BYTES = 4
"""Number of bytes of a conversation's key that choose among engines."""


class NoEngine(RuntimeError):
    """No engine accepts requests now."""


class Router:
    """Chooses an engine for each request, and counts the load that the request adds there."""

    def __init__(
        self, block_tokens: int, prefill_engines: int = 0, prefill_min_tokens: int = 1
    ) -> None:
        """`prefill_engines` and `prefill_min_tokens` are as in `ParallelConfig`."""
        self._block_tokens = block_tokens
        self._prefill_engines = prefill_engines
        self._prefill_min_tokens = prefill_min_tokens
        self._roster = Roster()
        self._engines: dict[int, RoutedEngine] = {}
        self._index = PrefixIndex()
        self._unreachable: frozenset[EngineId] = frozenset()
        self._routable = RoutableEngines(self._roster, self._unreachable)
        self._reported = _BacklogSum(RoutedEngine.waiting)
        self._own = _BacklogSum(RoutedEngine.own_waiting)

    @property
    def active_ranks(self) -> list[int]:
        return self._routable.active.ranks

    def can_place(self, version: str | None) -> bool:
        """Returns whether an engine with this version (None: any version) accepts a request now."""
        return bool(self._candidates(version, 0).ranks)

    def set_unreachable(self, engines: frozenset[EngineId]) -> None:
        """Sets the engines that get no requests; a successor with the same rank does get them."""
        self._unreachable = engines
        self._routable = RoutableEngines(self._roster, engines)

    def update(self, view: ClusterView) -> None:
        """Applies the roster and the load reports. An engine that restarted, or whose workers are
        being replaced, has lost its cache."""
        if view.roster != self._roster:
            self._update_roster(view.roster)
        for report in view.reports.engines:
            engine = self._engines.get(report.rank)
            if engine is not None and engine.incarnation in (0, report.incarnation):
                engine.update_load(EngineLoad.of(report))

    def update_loads(self, loads: Iterable[EngineLoad]) -> None:
        """Applies loads of engines of the roster."""
        for load in loads:
            engine = self._engines.get(load.rank)
            if engine is not None:
                engine.update_load(load)

    def _update_roster(self, roster: Roster) -> None:
        before, self._roster, self._engines = self._engines, roster, {}
        for member in roster.members:
            engine = before.get(member.rank)
            if engine is not None and engine.incarnation == member.incarnation:
                del before[member.rank]
            else:
                engine = RoutedEngine(member, self._index)
                self._reported.add(engine)
                self._own.add(engine)
            if member.state is MemberState.REPAIRING:
                engine.forget_all()
            engine.limit_blocks(MAX_TRACKED_BLOCKS // len(roster.members))
            self._engines[member.rank] = engine
        for gone in before.values():
            gone.forget_all()
            self._reported.remove(gone)
            self._own.remove(gone)
        self._routable = RoutableEngines(roster, self._unreachable)

    def choose(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        rank: int | None = None,
        version: str | None = None,
        max_tokens: int = 0,
        numerics: str | None = None,
        role: Role = Role.DECODE,
        is_handed_over: bool = False,
    ) -> Route:
        """Chooses an engine, and counts the request's load there until the route is released. With
        `rank`, chooses that engine; with `version`, one that may continue an answer with it.
        `max_tokens` is the number of tokens that the answer may still get. With `numerics`, prefers
        engines of this class. `is_handed_over` means that any engine can read the KV of the prompt.
        Raises NoEngine."""
        active = self.active_ranks
        if rank is not None and rank not in active:
            raise NoEngine(f"engine {rank} does not accept requests; active engines: {active}")
        candidates = self._candidates(version, len(token_ids) + max_tokens)
        of_role = self._of_role(candidates, role)
        candidates = of_role if of_role.ranks else candidates
        if numerics is not None:
            alike = self._routable.alike(candidates, numerics)
            candidates = alike if alike.ranks else candidates
        if not candidates.ranks:
            which = "engine" if version is None else f"engine of version {version}"
            raise NoEngine(f"no {which} accepts requests now")
        prompt = PromptBlocks(token_ids, self._block_tokens, salt)
        if rank is None:
            rank = self._pick(request_id, prompt, candidates)
        engine = self._engines[rank]
        known = engine.cached_blocks(prompt.names)
        cached = (len(prompt.names) if is_handed_over else known) * self._block_tokens
        tokens, blocks = max(1, prompt.num_tokens - cached), len(prompt.names)
        engine.add_load(engine.num_reports, tokens, 1, blocks, 1)
        engine.record_prefix(prompt.names, known)
        return Route(rank, tokens, engine, blocks, engine.num_reports)

    def learn(self, token_ids: Sequence[int], salt: str | None, hint: PrefixHint) -> None:
        """Records that an engine has computed the beginning of a prompt for another ingress."""
        holder = self._engines.get(hint.rank)
        if holder is not None:
            known = token_ids[: hint.num_tokens]
            names = PromptBlocks(known, self._block_tokens, salt).names
            holder.record_prefix(names, holder.cached_blocks(names))

    def version_to_split(
        self, token_ids: Sequence[int], *, salt: str | None, version: str | None, max_tokens: int
    ) -> str | None:
        """Returns the version on which one engine should compute this prompt and another one
        continue: engines of both roles must be available, and the decode engines must lack much of
        the prompt. Returns None if one engine should do both."""
        least = max(self._prefill_min_tokens, self._block_tokens + 1)
        if not self._prefill_engines or len(token_ids) < least:
            return None
        candidates = self._candidates(version, len(token_ids) + max_tokens)
        prefill, decode = (self._of_role(candidates, role) for role in Role)
        found = self._common_version(prefill, decode)
        if found is None:
            return None
        names = PromptBlocks(token_ids, self._block_tokens, salt).names
        known = self._index.longest(names, decode.as_set) * self._block_tokens
        return found if len(token_ids) - known >= self._prefill_min_tokens else None

    def _common_version(self, prefill: Candidates, decode: Candidates) -> str | None:
        """Returns a version that engines of both roles have, or None."""
        members = self._roster.members
        of_prefill = {m.version for m in members if m.rank in prefill.as_set}
        of_decode = {m.version for m in members if m.rank in decode.as_set}
        return next(iter(sorted(of_prefill & of_decode)), None)

    def _of_role(self, candidates: Candidates, role: Role) -> Candidates:
        if not self._prefill_engines:
            return candidates
        return candidates.of_role(role, self._prefill_engines)

    def backlog(self, max_rows: int) -> Backlog:
        """Returns the backlog of all engines; each runs up to `max_rows` requests at once."""
        return self._reported.total(max_rows)

    def own_backlog(self, max_rows: int) -> Backlog:
        """Returns the backlog of this ingress's own requests, for use while reports are too old:
        what other ingresses have sent is unknown then."""
        return self._own.total(max_rows)

    def _candidates(self, version: str | None, num_tokens: int) -> Candidates:
        if version is not None:
            return self._routable.of_version(version)
        return self._routable.long_enough(num_tokens)

    def _pick(self, request_id: str, prompt: PromptBlocks, candidates: Candidates) -> int:
        """Returns the rank of the best engine for a prompt."""
        names = prompt.names
        longest = self._index.longest(names, candidates.as_set)
        is_known = longest == len(names)
        conversation = request_id.encode() if is_known else prompt.digest(longest + 1)
        considered = self._considered(candidates, conversation, names[:longest])
        engines = [self._engines[rank] for rank in considered]
        found = [engine.cached_blocks(names) for engine in engines]
        diverges = any(
            blocks == longest and engine.diverges(names, blocks)
            for engine, blocks in zip(engines, found, strict=True)
        )
        divisor, size = SHARED_PREFIX_DIVISOR if diverges else 1, self._block_tokens
        scores = [
            engine.cost(prompt.num_tokens - blocks // divisor * size, size)
            for engine, blocks in zip(engines, found, strict=True)
        ]
        limit = min(scores) + SLACK_TOKENS
        equals = [place for place, score in enumerate(scores) if score <= limit]
        if not diverges:
            most = max(found[place] for place in equals)
            equals = [place for place in equals if found[place] == most]
        if len(equals) == 1:
            return considered[equals[0]]
        ranks = [considered[place] for place in equals]
        return min(ranks, key=lambda rank: _rendezvous_hash(conversation, rank))

    def _considered(
        self, candidates: Candidates, conversation: bytes, prefix: Sequence[int]
    ) -> list[int]:
        """Returns the engines that are scored; `prefix` is the longest prefix that one of them
        holds."""
        if len(candidates.ranks) <= MAX_SCORED:
            return candidates.ranks
        neighbours = candidates.ring.neighbours(conversation, CONSIDERED)
        if not prefix:
            return neighbours
        holders = self._index.holders(prefix[-1])
        if len(holders) > CONSIDERED:  # many engines share the prefix: any of them will do
            start = int.from_bytes(conversation[:_KEY_BYTES]) % len(holders)
            known = [*islice(cycle(holders), start, start + CONSIDERED)]
        else:
            known = [*holders]
        return list(dict.fromkeys([*neighbours, *candidates.as_set.intersection(known)]))


class _BacklogSum:
    """The sum of the backlogs of all engines; recomputes only those of engines that have
    changed."""

    def __init__(self, backlog_of: Callable[[RoutedEngine, int], Backlog]) -> None:
        self._backlog_of = backlog_of
        self._parts: dict[RoutedEngine, Backlog] = {}
        self._sum = Backlog()
        self._max_rows = 0
        self._changed: set[RoutedEngine] = set()

    def add(self, engine: RoutedEngine) -> None:
        self._parts[engine] = Backlog()
        engine.notify(self._changed)
        self._changed.add(engine)

    def remove(self, engine: RoutedEngine) -> None:
        self._changed.discard(engine)
        engine.stop_notifying()
        self._sum = _exchanged(self._sum, self._parts.pop(engine), Backlog())

    def total(self, max_rows: int) -> Backlog:
        """Returns the sum. `max_rows` is as in `RoutedEngine.waiting`."""
        if max_rows != self._max_rows:
            self._max_rows = max_rows
            self._changed.update(self._parts)
        for engine in self._changed:
            before, backlog = self._parts[engine], self._backlog_of(engine, max_rows)
            if backlog != before:
                self._parts[engine] = backlog
                self._sum = _exchanged(self._sum, before, backlog)
        self._changed.clear()
        return self._sum


def _exchanged(whole: Backlog, before: Backlog, after: Backlog) -> Backlog:
    """Returns the sum with one part replaced by another."""
    parts = zip(whole, before, after, strict=True)
    return Backlog(*[number - old + new for number, old, new in parts])


def _rendezvous_hash(key: bytes, rank: int) -> bytes:
    return hashlib.blake2b(key + rank.to_bytes(4, "little"), digest_size=8).digest()
