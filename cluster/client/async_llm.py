"""The engines as one, for one ingress: places requests on engines, collects their outputs, and
moves requests whose engine cannot continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from swell.cluster.client.engine_connection import EngineId, EngineListener
from swell.cluster.client.engine_core_client import ConnectEngines, EngineCallFailed, EngineCalls
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.request_placer import RequestPlacer
from swell.cluster.client.requests.answer_version import AnswerVersion
from swell.cluster.client.requests.deadline import RequestTimedOut
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import RequestOutputCollector, RequestOutputKind
from swell.cluster.client.requests.request_state import (
    EngineGone,
    MigrationReason,
    RequestCancelled,
    RequestState,
)
from swell.cluster.client.routing.admission import Admission, TooManyWaiting
from swell.cluster.client.routing.readiness import ReadinessTracker, ReadyState
from swell.cluster.client.routing.router import NoEngine
from swell.cluster.text.params.sampling_params import DERIVED_SALT, SamplingParams
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.roster import Roster
from swell.coordinator.transport.runtime import THREADS, Runtime
from swell.coordinator.wire import ClusterView, EngineLoad
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest, FinishReason

_FIRST_VIEW_HEARTBEATS = 5
"""Number of heartbeats that a starting ingress waits for the first view."""

_STALE_VIEW_HEARTBEATS = 5
"""Number of heartbeats without a view after which its reports are too old for admission."""


class AsyncLLM(EngineListener):
    """Serves requests on all engines: the caller sees neither which engine answers nor that an
    engine left (see `RequestPlacer`).

    `on_limits` gets max_model_len (in tokens) and the vocabulary size with every new roster.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        config: Config,
        connect: ConnectEngines,
        metrics: PrometheusStats,
        on_limits: Callable[[int, int], None],
        runtime: Runtime = THREADS,
    ) -> None:
        self._view = ClusterView(Roster())
        self._loads: dict[int, EngineLoad] = {}
        """Loads that changed since that view, by rank."""
        self.client_index = runtime.random_bits(31)
        self._readiness = ReadinessTracker(
            config.cluster.stall_timeout_s, shares_experts=config.parallel.expert
        )
        self._config = config
        self._admission = Admission(
            config.serve.max_waiting_requests,
            config.serve.max_waiting_tokens,
            config.serve.ingress_replicas or 1,
        )
        self._clock = clock = runtime.now
        self._metrics = metrics
        self._on_limits = on_limits
        self._ends: str | None = None
        """Why new requests are refused; None if they are accepted."""
        self._first_view = asyncio.Event()
        self._first_engine = asyncio.Event()
        self._num_early = 0
        """Number of requests that arrived before the first engine and wait for it."""
        self._view_at_s = clock()
        """When the newest view arrived."""
        self._log = StructuredLogger("cluster.ingress", client=self.client_index)
        self._processor = OutputProcessor(
            detokenizer,
            stream_interval=config.serve.stream_interval,
            stats=metrics,
            clock=clock,
            log=self._log,
        )
        self._client = connect(
            self.client_index,
            self,
            metrics,
            heartbeat_s=config.cluster.heartbeat_s,
            silence_s=config.cluster.stall_timeout_s,
        )
        self._calls = EngineCalls(self._client, clock)
        self._placer = RequestPlacer(
            config, self._processor, self._client, metrics, self._log, clock
        )

    @property
    def view(self) -> ClusterView:
        """The cluster as the coordinator's newest messages describe it."""
        if self._loads:
            reports = self._view.reports.with_loads(self._loads)
            self._view = ClusterView(self._view.roster, reports)
            self._loads = {}
        return self._view

    @property
    def has_seen_view(self) -> bool:
        """Whether the coordinator has ever described the cluster."""
        return self._first_view.is_set()

    @property
    def has_seen_engine(self) -> bool:
        """Whether there ever was an engine: its limits are known then."""
        return self._first_engine.is_set()

    @property
    def active_ranks(self) -> list[int]:
        return self._placer.active_ranks

    async def wait_for_view(self) -> None:
        """Waits for the first view, but not long: the coordinator may be down."""
        try:
            async with asyncio.timeout(_FIRST_VIEW_HEARTBEATS * self._config.cluster.heartbeat_s):
                await self._first_view.wait()
        except TimeoutError:
            self._log.warning("the coordinator is silent")

    async def wait_for_engine(self) -> None:
        """Waits until the limits of an engine are known: an ingress may start before any engine is
        ready. Raises NoEngine after `serve.no_engine_timeout_s`, and at once if
        `serve.max_waiting_requests` requests wait already."""
        if self.has_seen_engine:
            return
        serve = self._config.serve
        if self._num_early >= serve.max_waiting_requests:
            raise NoEngine(
                f"no engine is ready yet, and {self._num_early} requests already wait for one"
            )
        self._num_early += 1
        try:
            async with asyncio.timeout(serve.no_engine_timeout_s):
                await self._first_engine.wait()
        except TimeoutError:
            limit_s = serve.no_engine_timeout_s
            raise NoEngine(f"no engine is ready yet; waited {limit_s:g} s for one") from None
        finally:
            self._num_early -= 1
        self._check_open()

    def _check_open(self) -> None:
        if self._ends is not None:
            raise NoEngine(self._ends)

    def check_ready(self) -> ReadyState:
        """Returns which engines can make progress now."""
        return self._readiness.check(self._clock())

    def check_admission(self) -> None:
        """Raises TooManyWaiting if another request may not wait (see `admission.py`), and NoEngine
        while the engines sleep and an operator refuses requests. Requests that have, or had, an
        engine may always wait.

        The backlog is the reported one. While the coordinator is down, it is what this ingress
        itself has sent: the engines continue meanwhile, and the last report would refuse every
        request until the coordinator is back.
        """
        self._check_open()
        if self._view.reports.sleep.refuses:
            raise NoEngine("the engines sleep, and requests are refused until they are woken up")
        now_s = self._clock()
        stale_s = _STALE_VIEW_HEARTBEATS * self._config.cluster.heartbeat_s
        backlog = self._placer.backlog(own_only=now_s - self._view_at_s > stale_s)
        try:
            self._admission.check(backlog, now_s)
        except TooManyWaiting as refusal:
            self._metrics.refused(refusal.code)
            raise

    def submit(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        kind: RequestOutputKind,
        index: int = 0,
        *,
        prompt: str | None = None,
        text_start: TextStart = TextStart.NEW_TEXT,
        answer_version: AnswerVersion | None = None,
        collector: type[RequestOutputCollector] = RequestOutputCollector,
        make_content_parser: Callable[[], Parser] | None = None,
    ) -> RequestState:
        """Sends a request, which produces answer number `index` to its prompt, to an engine, or
        queues it until one is available. Its outputs arrive in the state's queue, which is a
        `collector`. Raises NoEngine if there never was an engine; if this raises, nothing of the
        request is kept. All requests that together answer one HTTP request share `answer_version`.
        `make_content_parser` is as in `OutputText`."""
        if not self.has_seen_engine:
            raise NoEngine("no engine is ready yet")
        if generation := self._view.reports.cache_generation:
            salt = _salt_of_generation(generation, request.cache_salt)
            request = replace(request, cache_salt=salt)
        state = self._processor.add_request(
            request,
            params,
            kind=kind,
            queue=collector(kind, request.request_id),
            prompt=prompt,
            index=index,
            text_start=text_start,
            answer_version=answer_version,
            make_content_parser=make_content_parser,
        )
        try:
            self._placer.place(state)
        except BaseException:
            self.abort([request.request_id])
            raise
        return state

    def abort(self, request_ids: Sequence[str]) -> bool:
        """Ends requests, whose clients get the output so far; ignores unknown and finished ones.
        Returns whether there were any others."""
        ended = self._processor.abort_requests(request_ids)
        self._placer.abort_in_engines(ended)
        return bool(ended)

    def cancel(self, request_ids: Sequence[str]) -> bool:
        """Does the same, but fails the requests with RequestCancelled."""
        return self._fail(request_ids, RequestCancelled(), FinishReason.ABORT)

    def expire(self, request_ids: Sequence[str], timeout_s: float) -> None:
        """Fails these requests with RequestTimedOut, except those that have finished."""
        self._fail(request_ids, RequestTimedOut(timeout_s), FinishReason.ABORT)

    def end_requests(self, reason: str) -> None:
        """Fails all requests: running ones with EngineGone, and those that wait for the first
        engine with NoEngine. Later requests are refused with the same reason."""
        self._ends = reason
        self._first_engine.set()
        self._fail(None, EngineGone(reason))

    async def call_engine(self, rank: int, method: str, *args: str | int, timeout_s: float) -> Any:
        """Calls a service of an engine. Raises EngineCallFailed with the engine's message, and
        TimeoutError if no answer arrives in time."""
        member = self.view.roster.find(rank)
        if member is None:
            raise EngineCallFailed(f"engine {rank} has left")
        return await self._calls.call(EngineId.of(member), method, list(args), timeout_s)

    def close(self) -> None:
        """Fails all requests with EngineGone, and closes the connections."""
        self._fail(None, EngineGone("the ingress is shutting down"))
        self._client.close()

    # ---------------------------------------------------------------- the connections

    def on_view(self, view: ClusterView, lost: list[EngineId]) -> None:
        is_new = view.roster != self._view.roster or not self.has_seen_engine
        self._view, self._loads = view, {}
        self._view_at_s = self._clock()
        self._admission.observe(view, self._view_at_s)
        self._readiness.on_view(view, self._view_at_s)
        self._first_view.set()
        members = view.roster.members
        if members and is_new:
            self._on_limits(
                min(m.max_model_len for m in members), min(m.vocab_size for m in members)
            )
            self._first_engine.set()
        self._placer.on_view(view, lost)

    def on_loads(self, loads: Sequence[EngineLoad]) -> None:
        self._view_at_s = self._clock()
        self._loads.update({load.rank: load for load in loads})
        self._placer.on_loads(loads)

    def engines_in_use(self) -> frozenset[EngineId]:
        states = self._processor.request_states.values()
        return frozenset(state.engine for state in states if state.engine is not None)

    def versions_in_use(self) -> list[str]:
        states = self._processor.request_states.values()
        versions = {state.answer_version.required for state in states}
        return sorted(version for version in versions if version)

    def on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._calls.on_answer(message.utility_output)
        if message.started:
            self._processor.process_started(message)
        try:
            result = self._processor.process_outputs(message.outputs)
        except Exception:
            for output in message.outputs:
                if (state := self._processor.find(output.request_id, output.attempt)) is not None:
                    state.on_unread()
            raise
        self._placer.abort_in_engines(result.reqs_to_abort)
        self._placer.migrate(result.dropped, MigrationReason.DROPPED)
        self._placer.continue_elsewhere(result.prefilled)

    def on_messages_lost(self, engine: EngineId) -> None:
        self._placer.migrate_all(engine, MigrationReason.MESSAGES_LOST)

    def on_unreachable(self, engines: Mapping[EngineId, str]) -> None:
        self._readiness.set_unreachable(engines)
        self._placer.set_unreachable(frozenset(engines))

    def _fail(
        self,
        request_ids: Sequence[str] | None,
        error: Exception,
        reason: FinishReason = FinishReason.ERROR,
    ) -> bool:
        ended = self._processor.propagate_error(error, request_ids, reason)
        self._placer.abort_in_engines(ended)
        return bool(ended)


def _salt_of_generation(generation: int, cache_salt: str | None) -> str:
    """Returns the cache salt of a request after prefix caches were emptied `generation` times."""
    return f"{DERIVED_SALT}{generation} {'' if cache_salt is None else 'salt ' + cache_salt}"
