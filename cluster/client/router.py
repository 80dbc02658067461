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

Of many engines only some are scored, so that a choice costs the same however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice

from swell.cluster.client.admission import Backlog
from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.prefix_index import PrefixIndex
from swell.cluster.client.prompt_blocks import PromptBlocks
from swell.cluster.client.routable_engines import Candidates, Role, RoutableEngines
from swell.cluster.client.routed_engine import MAX_TRACKED_BLOCKS, Route, RoutedEngine
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.wire import ClusterView, EngineLoad
from swell.engine.wire import PrefixHint

SLACK_TOKENS = 256
"""A smaller difference is no reason to leave a cached prefix, or the engine that other ingresses
would choose."""

SHARED_PREFIX_DIVISOR = 4
"""A prefix that other conversations continue counts for this fraction of its tokens."""

MAX_SCORED = 64
"""Of so many engines each is considered for each request."""

CONSIDERED = 16
"""Of more engines: those that hold the longest prefix, and neighbours on the ring of hashes, which
depend on the conversation alone; at most so many of each. The least loaded would not do: all
ingresses would choose these until the next report."""

_KEY_BYTES = 4
"""Of a conversation's key, for a choice among engines."""


class NoEngine(RuntimeError):
    """No engine takes requests now."""


class Router:
    """Chooses an engine for each request and counts the load that it adds there."""

    def __init__(
        self, block_tokens: int, prefill_engines: int = 0, prefill_min_tokens: int = 1
    ) -> None:
        """The last two are those of `ParallelConfig`."""
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
        """Whether an engine of this version, or of any, takes a request now."""
        return bool(self._candidates(version, 0).ranks)

    def set_unreachable(self, engines: frozenset[EngineId]) -> None:
        """These engines get no requests; a successor at the rank of one does."""
        self._unreachable = engines
        self._routable = RoutableEngines(self._roster, engines)

    def update(self, view: ClusterView) -> None:
        """Apply the roster and the load reports. An engine that was started again, or whose workers
        are being replaced, has lost its cache."""
        if view.roster != self._roster:
            self._update_roster(view.roster)
        for report in view.reports:
            engine = self._engines.get(report.rank)
            if engine is not None and engine.incarnation in (0, report.incarnation):
                engine.update_load(EngineLoad.of(report))

    def update_loads(self, loads: Iterable[EngineLoad]) -> None:
        """Apply loads of engines of the roster."""
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
            engine.max_blocks = MAX_TRACKED_BLOCKS // len(roster.members)
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
        role: Role = Role.DECODE,
        is_handed_over: bool = False,
    ) -> Route:
        """Choose an engine, and count the request's load there until the route is released. With
        `rank`, that engine; with `version`, one that may continue an answer of it. `max_tokens`:
        how many the answer may still get. `is_handed_over`: any engine can read the KV of the
        prompt. Raises NoEngine."""
        active = self.active_ranks
        if rank is not None and rank not in active:
            raise NoEngine(f"engine {rank} takes no requests; active: {active}")
        candidates = self._candidates(version, len(token_ids) + max_tokens)
        of_role = self._of_role(candidates, role)
        candidates = of_role if of_role.ranks else candidates
        if not candidates.ranks:
            which = "engine" if version is None else f"engine of version {version}"
            raise NoEngine(f"no {which} takes requests now")
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
        """An engine has computed the beginning of a prompt, for another ingress."""
        holder = self._engines.get(hint.rank)
        if holder is not None:
            known = token_ids[: hint.num_tokens]
            names = PromptBlocks(known, self._block_tokens, salt).names
            holder.record_prefix(names, holder.cached_blocks(names))

    def version_to_split(
        self, token_ids: Sequence[int], *, salt: str | None, version: str | None, max_tokens: int
    ) -> str | None:
        """The version of two engines of which one should compute this prompt, and another one
        continue: both are there, and the one that continues lacks much of it. None: one engine
        should do both."""
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
        """Of an engine of each kind."""
        members = self._roster.members
        of_prefill = {m.version for m in members if m.rank in prefill.as_set}
        of_decode = {m.version for m in members if m.rank in decode.as_set}
        return next(iter(sorted(of_prefill & of_decode)), None)

    def _of_role(self, candidates: Candidates, role: Role) -> Candidates:
        if not self._prefill_engines:
            return candidates
        return candidates.of_role(role, self._prefill_engines)

    def backlog(self, max_rows: int) -> Backlog:
        """What waits at all engines, each of which runs `max_rows` requests at once."""
        return self._reported.total(max_rows)

    def own_backlog(self, max_rows: int) -> Backlog:
        """The same where reports are too old: what other ingresses have sent is not known."""
        return self._own.total(max_rows)

    def _candidates(self, version: str | None, num_tokens: int) -> Candidates:
        if version is not None:
            return self._routable.of_version(version)
        return self._routable.long_enough(num_tokens)

    def _pick(self, request_id: str, prompt: PromptBlocks, candidates: Candidates) -> int:
        """The best engine for a prompt."""
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
        """The engines that are scored; `prefix` is the longest that one of them holds."""
        if len(candidates.ranks) <= MAX_SCORED:
            return candidates.ranks
        neighbours = candidates.ring.neighbours(conversation, CONSIDERED)
        if not prefix:
            return neighbours
        holders = self._index.holders(prefix[-1])
        if len(holders) > CONSIDERED:  # a prefix that many share: any of them will do
            start = int.from_bytes(conversation[:_KEY_BYTES]) % len(holders)
            known = [*islice(cycle(holders), start, start + CONSIDERED)]
        else:
            known = [*holders]
        return list(dict.fromkeys([*neighbours, *candidates.as_set.intersection(known)]))


class _BacklogSum:
    """The backlog of all engines: only those that have changed are looked at again."""

    def __init__(self, backlog_of: Callable[[RoutedEngine, int], Backlog]) -> None:
        self._backlog_of = backlog_of
        self._parts: dict[RoutedEngine, Backlog] = {}
        self._sum = Backlog()
        self._max_rows = 0
        self._changed: set[RoutedEngine] = set()

    def add(self, engine: RoutedEngine) -> None:
        self._parts[engine] = Backlog()
        engine.changed_sums += (self._changed,)
        self._changed.add(engine)

    def remove(self, engine: RoutedEngine) -> None:
        self._changed.discard(engine)
        engine.changed_sums = ()
        self._sum = _exchanged(self._sum, self._parts.pop(engine), Backlog())

    def total(self, max_rows: int) -> Backlog:
        """`max_rows`: see `RoutedEngine.waiting`."""
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
    """The sum with one part in place of another."""
    parts = zip(whole, before, after, strict=True)
    return Backlog(*[number - old + new for number, old, new in parts])


def _rendezvous_hash(key: bytes, rank: int) -> bytes:
    return hashlib.blake2b(key + rank.to_bytes(4, "little"), digest_size=8).digest()
