"""Placement of requests on engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.engine_core_client import EngineCoreClient
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.requests.handover import HANDED_OVER
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.request_state import EngineGone, MigrationReason, RequestState
from swell.cluster.client.routing.admission import Backlog
from swell.cluster.client.routing.placement_queue import PlacementQueue
from swell.cluster.client.routing.router import NoEngine, Router
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.wire import ClusterView, EngineLoad
from swell.engine.wire import AbortRequests, JourneyEventType


class RequestPlacer:
    """Places requests on engines, and moves those whose engine cannot continue.

    A request moves if its engine left the roster or dropped it, if messages to or from the engine
    were lost, or if the engine replaces a worker or is unreachable and another engine can continue.
    It is sent to another engine, or to the same one again, as the next attempt, together with the
    output tokens so far; that engine recomputes them and continues. An answer that has begun
    continues only on an engine with its version, if possible on one of the numerics class in which
    it began. If no engine is available, a request waits: for
    `cluster.start_timeout_s` if it had an engine before, otherwise for `serve.no_engine_timeout_s`.
    """

    def __init__(
        self,
        config: Config,
        processor: OutputProcessor,
        client: EngineCoreClient,
        metrics: PrometheusStats,
        log: StructuredLogger,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._processor = processor
        self._client = client
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._roster = Roster()
        self._unreachable: frozenset[EngineId] = frozenset()
        parallel = config.parallel
        self._splits_prompts = parallel.prefill_engines > 0
        self._router = Router(
            config.cache.block_tokens, parallel.prefill_engines, parallel.prefill_min_tokens
        )
        self._queue = PlacementQueue()

    @property
    def active_ranks(self) -> list[int]:
        return self._router.active_ranks

    def backlog(self, *, own_only: bool) -> Backlog:
        """Returns the waiting requests of all ingresses; with `own_only`, only those of this
        ingress."""
        router, queue = self._router, self._queue
        get_backlog = router.own_backlog if own_only else router.backlog
        backlog = get_backlog(self._config.scheduler.max_rows)
        return backlog._replace(
            own_requests=backlog.own_requests + len(queue),
            own_tokens=backlog.own_tokens + queue.num_tokens,
        )

    def on_view(self, view: ClusterView, lost: Sequence[EngineId]) -> None:
        """Updates the router with the new view. Then moves the requests of lost engines and of
        engines that are being repaired or are unreachable, and places the queued requests."""
        self._roster = view.roster
        self._router.update(view)
        for engine in lost:
            left = engine.incarnation in view.roster.left
            self.migrate_all(engine, MigrationReason.LEFT if left else MigrationReason.DIED)
        self._use_active_engines()

    def on_loads(self, loads: Iterable[EngineLoad]) -> None:
        """Updates the router with loads that changed after the view."""
        self._router.update_loads(loads)

    def set_unreachable(self, engines: frozenset[EngineId]) -> None:
        """Sets the engines that this ingress cannot use. They get no requests, and their requests
        continue on another engine if there is one."""
        self._unreachable = engines
        self._router.set_unreachable(engines)
        self._use_active_engines()

    def _use_active_engines(self) -> None:
        for member in self._roster.members:
            if member.state is MemberState.REPAIRING:
                self._migrate_where_possible(EngineId.of(member), MigrationReason.REPAIRING)
            elif self._unreachable and EngineId.of(member) in self._unreachable:
                self._migrate_where_possible(EngineId.of(member), MigrationReason.UNREACHABLE)
        for request_id in self._queue.request_ids:
            self.place(self._processor.request_states[request_id])

    def place(self, state: RequestState) -> None:
        """Begins the request's next attempt, or queues the request until an engine is available.
        Attempts after the first may run on any engine with the answer's version."""
        request, version = state.request, state.answer_version.required
        if request.prefix_hint is not None and state.attempt == 1:
            self._router.learn(request.prompt_token_ids, request.cache_salt, request.prefix_hint)
        max_tokens = request.max_tokens - len(state.output_token_ids)
        rank = None if state.ranks or version is not None else request.data_parallel_rank
        if self._splits_prompts and rank is None and not state.output_token_ids:
            self._split(state, version, max_tokens)
            version = state.handover.version or version
        has_begun = bool(state.output_token_ids) or state.handover.is_ready
        try:
            route = self._router.choose(
                request.request_id,
                request.prompt_token_ids + state.output_token_ids,
                salt=request.cache_salt,
                rank=rank,
                version=version,
                max_tokens=max_tokens,
                numerics=state.numerics if has_begun else None,
                role=state.handover.role,
                is_handed_over=state.handover.is_ready,
            )
        except NoEngine as error:
            self._enqueue(state, str(error))
            return
        member = self._roster.find(route.rank)
        assert member is not None, (
            f"the router chose engine {route.rank}, which is not in the roster"
        )
        engine, now_s, is_moved = EngineId.of(member), self._clock(), state.is_moved
        if has_begun and state.numerics not in ("", member.numerics):
            self._metrics.numerics_changed()
        state.assign(engine, member, route, now_s)
        state.journey.add(JourneyEventType.ROUTED, now_s, *state.placement)
        self._client.send(engine, state.engine_request())
        if is_moved:
            self._metrics.resubmitted()

    def _split(self, state: RequestState, version: str | None, max_tokens: int) -> None:
        """Decides whether one engine computes the prompt and another one continues."""
        request, handover = state.request, state.handover
        if handover.version is not None and not self._router.can_place(handover.version):
            handover.fail()
        if handover.may_begin:
            found = self._router.version_to_split(
                request.prompt_token_ids,
                salt=request.cache_salt,
                version=version,
                max_tokens=max_tokens,
            )
            if found is not None:
                handover.begin(self._config.cache.block_tokens, found)

    def continue_elsewhere(self, states: Iterable[RequestState]) -> None:
        """Places requests whose prompt was computed on another engine, which continues."""
        now_s = self._clock()
        for state in states:
            placement = state.placement
            state.end_prefill()
            state.journey.add(JourneyEventType.RESUBMITTED, now_s, *placement, HANDED_OVER)
            self.place(state)

    def migrate_all(self, engine: EngineId, reason: MigrationReason) -> None:
        """Moves all requests of an engine."""
        states = self._processor.request_states.values()
        self.migrate([state for state in states if state.engine == engine], reason)

    def _migrate_where_possible(self, engine: EngineId, reason: MigrationReason) -> None:
        """Moves those requests of an engine that another engine can continue."""
        states = self._processor.request_states.values()
        here = [state for state in states if state.engine == engine]
        versions = {state.answer_version.required_elsewhere for state in here}
        placeable = {version for version in versions if self._router.can_place(version)}
        self.migrate([s for s in here if s.answer_version.required_elsewhere in placeable], reason)

    def migrate(self, states: Sequence[RequestState], reason: MigrationReason) -> None:
        """Ends the attempts of these requests, also in their engine if it is still there, and
        places the requests again."""
        if not states:
            return
        self._log.warning(
            "requests move",
            reason=str(reason),
            rank=states[0].ranks[-1],
            epoch=self._roster.epoch,
            requests=len(states),
        )
        self.abort_in_engines(states)
        now_s = self._clock()
        for state in states:
            placement = state.placement
            try:
                state.unassign(reason)
            except EngineGone as error:
                self._fail(state, error)
            else:
                state.journey.add(JourneyEventType.RESUBMITTED, now_s, *placement, str(reason))
                self.place(state)

    def abort_in_engines(self, states: Iterable[RequestState]) -> None:
        """Aborts the running attempts of requests in their engines; engines that have left get no
        message."""
        by_engine: dict[EngineId, list[RequestState]] = {}
        for state in states:
            if state.engine is not None:
                by_engine.setdefault(state.engine, []).append(state)
        for engine, here in by_engine.items():
            ids, attempts = [s.request_id for s in here], [s.attempt for s in here]
            self._client.send(engine, AbortRequests(ids, attempts))

    def _enqueue(self, state: RequestState, reason: str) -> None:
        """Queues a request until an engine is available, for a limited time."""
        if state.is_queued:
            return
        config = self._config
        begun = bool(state.ranks)
        limit_s = config.cluster.start_timeout_s if begun else config.serve.no_engine_timeout_s
        error = NoEngine(f"{reason}; waited {limit_s:g} s for one")
        queued = self._queue.add(state.request_id, len(state.request.prompt_token_ids))
        state.enqueue(queued)
        state.journey.add(JourneyEventType.QUEUED, self._clock())
        queued.fail_after(limit_s, lambda: self._fail(state, error), config.cluster.heartbeat_s)

    def _fail(self, state: RequestState, error: Exception) -> None:
        self._processor.propagate_error(error, [state.request_id])
