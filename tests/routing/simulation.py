"""A cluster that serves a trace on a simulated clock: no process, no sleep, always the same result.

Times are seconds since the start of the trace. Ingresses share nothing except the views that they
receive, which are late; each turn of a conversation may reach any of them.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, quantiles

from swell.cluster.client.routing.routed_engine import Route
from swell.cluster.client.routing.router import Router
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from tests.routing.trace import Conversation, Turn

BLOCK_TOKENS = 16
_ADDRESS = ChannelAddress("simulated", "", "")


@dataclass(frozen=True)
class SimulationConfig:
    """The parameters. A step takes `step_s`, plus a time for each of its prompt tokens and decoding
    rows."""

    step_s: float = 0.010
    token_s: float = 0.0001
    row_s: float = 0.0002
    step_tokens: int = 2048
    max_rows: int = 64
    num_blocks: int = 8192
    send_s: float = 0.002
    """The delay from an ingress to an engine."""
    report_s: float = 0.1
    """The time between two views."""
    view_delay_s: float = 0.05
    """The delay from the engines through the coordinator to an ingress."""


@dataclass
class _Request:
    """One turn in progress."""

    conversation: Conversation
    index: int
    route: Route
    sent_s: float
    uncomputed: int = 0
    hit_tokens: int = 0

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.index]

    @property
    def total_tokens(self) -> int:
        return self.turn.prompt_tokens + self.turn.answer_tokens


class SimulatedEngine:
    """An engine: a prefix cache, and steps that prompts and decoding rows share."""

    def __init__(self, member: Member, config: SimulationConfig) -> None:
        self.member = member
        self.config = config
        self.busy_s = 0.0
        self.stepping = False
        self._steps = 0
        self._waiting: deque[_Request] = deque()
        self._prefilling: deque[_Request] = deque()
        self._decoding: list[tuple[int, int, _Request]] = []
        """A heap of decoding requests, ordered by the step in which they finish."""
        self._order = count()
        self._held: dict[bytes, int] = {}
        self._partial_blocks = 0
        self._free_cached: OrderedDict[bytes, None] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    @property
    def _free_blocks(self) -> int:
        return self.config.num_blocks - len(self._held) - self._partial_blocks

    def add(self, request: _Request) -> None:
        request.uncomputed = request.turn.prompt_tokens
        self._waiting.append(request)

    def report(self) -> EngineReport:
        rows = len(self._prefilling) + len(self._decoding)
        waiting = sum(r.uncomputed for r in (*self._waiting, *self._prefilling))
        return EngineReport(
            self.member.rank,
            running=rows,
            waiting=len(self._waiting),
            waiting_tokens=waiting + len(self._decoding),
            kv_usage=1 - self._free_blocks / self.config.num_blocks,
            steps=self._steps,
        )

    def begin_step(self) -> tuple[float, list[_Request]]:
        """Returns the seconds that the next step takes, and the prompts that it completes."""
        while self._waiting and self._admit(self._waiting[0]):
            self._prefilling.append(self._waiting.popleft())
        rows = len(self._decoding)
        budget = tokens = self.config.step_tokens - rows
        completed = []
        while self._prefilling and tokens:
            request = self._prefilling[0]
            chunk = min(tokens, request.uncomputed)
            request.uncomputed -= chunk
            tokens -= chunk
            if request.uncomputed == 0:
                completed.append(self._prefilling.popleft())
        config = self.config
        took_s = config.step_s + (budget - tokens) * config.token_s + rows * config.row_s
        self.busy_s += took_s
        return took_s, completed

    def end_step(self, completed: Sequence[_Request]) -> list[_Request]:
        """Returns the requests that have all their tokens."""
        self._steps += 1
        for request in completed:
            last = self._steps + request.turn.answer_tokens - 1
            heapq.heappush(self._decoding, (last, next(self._order), request))
        finished = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            finished.append(heapq.heappop(self._decoding)[2])
            self._release(finished[-1])
        return finished

    def _admit(self, request: _Request) -> bool:
        """Reserves all blocks of prompt and answer, or none, so that a row is never preempted."""
        if len(self._prefilling) + len(self._decoding) >= self.config.max_rows:
            return False
        block_hashes = request.conversation.block_hashes
        usable = (request.turn.prompt_tokens - 1) // BLOCK_TOKENS
        hits = 0
        while hits < usable and (
            block_hashes[hits] in self._held or block_hashes[hits] in self._free_cached
        ):
            hits += 1
        wanted = block_hashes[: request.total_tokens // BLOCK_TOKENS]
        if sum(name not in self._held for name in wanted) + 1 > self._free_blocks:
            return False
        for name in wanted:
            self._held[name] = self._held.get(name, 0) + 1
            self._free_cached.pop(name, None)
        self._partial_blocks += 1
        while len(self._free_cached) > self._free_blocks:
            self._free_cached.popitem(last=False)
        request.hit_tokens = hits * BLOCK_TOKENS
        request.uncomputed -= request.hit_tokens
        return True

    def _release(self, request: _Request) -> None:
        self._partial_blocks -= 1
        for name in reversed(
            request.conversation.block_hashes[: request.total_tokens // BLOCK_TOKENS]
        ):
            self._held[name] -= 1
            if self._held[name] == 0:
                del self._held[name]
                self._free_cached[name] = None


@dataclass
class SimulationResult:
    """The result of a policy on a trace."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    followups: int = 0
    """The number of turns after the first whose previous engine still accepted requests."""
    moved: int = 0
    """The number of these turns that went to another engine."""
    busy_s: dict[int, float] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def moved_rate(self) -> float:
        return self.moved / self.followups

    @property
    def mean_ttft_s(self) -> float:
        return fmean(self.ttft_s)

    @property
    def imbalance(self) -> float:
        """Returns the busiest engine's time over the mean."""
        return max(self.busy_s.values()) / fmean(self.busy_s.values())

    def ttft_quantile_s(self, percent: int) -> float:
        return quantiles(self.ttft_s, n=100)[percent - 1]


class Simulation:
    """One run. `sizes` lists the times at which the number of engines changes, and the new numbers;
    the first entry is at 0."""

    def __init__(
        self,
        trace: Sequence[Conversation],
        policy: type[Router],
        *,
        ingresses: int = 1,
        sizes: Sequence[tuple[float, int]] = ((0.0, 4),),
        config: SimulationConfig = SimulationConfig(),
        seed: int = 0,
    ) -> None:
        self._config = config
        self._ingresses = [policy(BLOCK_TOKENS) for _ in range(ingresses)]
        self._rng = random.Random(seed)
        self._engines: dict[int, SimulatedEngine] = {}
        self._last_ranks: dict[int, int] = {}
        """The last engine of each conversation, by its number."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._epoch = 0
        self._open = sum(len(conversation.turns) for conversation in trace)
        self._outcome = SimulationResult()
        self.now_s = 0.0
        for at_s, size in sizes:
            self._at(at_s, partial(self._resize, size))
        self._at(0.0, self._publish)
        for conversation in trace:
            self._at(1.0 + conversation.start_s, partial(self._send_turn, conversation, 0))

    def run(self) -> SimulationResult:
        """Serves the whole trace."""
        while self._open:
            self.now_s, _, callback = heapq.heappop(self._events)
            callback()
        for rank, engine in self._engines.items():
            self._outcome.busy_s[rank] = engine.busy_s
        return self._outcome

    def _at(self, time_s: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), callback))

    def _resize(self, size: int) -> None:
        for rank in range(size):
            if rank not in self._engines:
                member = Member(rank, _ADDRESS, num_blocks=self._config.num_blocks)
                self._engines[rank] = SimulatedEngine(member, self._config)
        for rank, engine in self._engines.items():
            if rank >= size:
                old = engine.member
                engine.member = Member(
                    rank, _ADDRESS, MemberState.LEAVING, num_blocks=old.num_blocks
                )
        self._epoch += 1

    def _publish(self) -> None:
        engines = self._engines.values()
        roster = Roster(self._epoch, tuple(engine.member for engine in engines))
        view = ClusterView(roster, ClusterReports(engines=[engine.report() for engine in engines]))
        for policy in self._ingresses:
            self._at(self.now_s + self._config.view_delay_s, partial(policy.update, view))
        self._at(self.now_s + self._config.report_s, self._publish)

    def _send_turn(self, conversation: Conversation, index: int) -> None:
        policy = self._rng.choice(self._ingresses)
        route = policy.choose(
            f"{conversation.number}-{index}",
            conversation.token_ids[: conversation.turns[index].prompt_tokens],
        )
        request, rank = _Request(conversation, index, route, self.now_s), route.rank
        last_rank = self._last_ranks.get(conversation.number)
        if last_rank in policy.active_ranks:
            self._outcome.followups += 1
            self._outcome.moved += last_rank != rank
        self._last_ranks[conversation.number] = rank
        self._at(self.now_s + self._config.send_s, partial(self._on_arrival, rank, request))

    def _on_arrival(self, rank: int, request: _Request) -> None:
        engine = self._engines[rank]
        engine.add(request)
        if not engine.stepping:
            self._step(engine)

    def _step(self, engine: SimulatedEngine) -> None:
        engine.stepping = not engine.is_idle
        if engine.stepping:
            took_s, completed = engine.begin_step()
            self._at(self.now_s + took_s, partial(self._on_step_done, engine, completed))

    def _on_step_done(self, engine: SimulatedEngine, completed: Sequence[_Request]) -> None:
        finished = engine.end_step(completed)
        outcome = self._outcome
        for request in completed:
            request.route.on_first_token()
            outcome.ttft_s.append(self.now_s - request.sent_s)
            outcome.prompt_tokens += request.turn.prompt_tokens
            outcome.hit_tokens += request.hit_tokens
        for request in finished:
            request.route.release()
            self._open -= 1
            following = request.index + 1
            if following < len(request.conversation.turns):
                at_s = self.now_s + request.conversation.turns[following].think_s
                self._at(at_s, partial(self._send_turn, request.conversation, following))
        self._step(engine)
