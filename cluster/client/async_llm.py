"""Answers for one ingress: places requests on engines, collects what they give, and moves
requests whose engine cannot go on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from swell.cluster.client.admission import Admission, Backlog, TooManyWaiting
from swell.cluster.client.deadline import RequestTimedOut
from swell.cluster.client.engine_core_client import ConnectEngines, EngineId
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.output_processor import OutputProcessor
from swell.cluster.client.outputs import RequestOutputKind
from swell.cluster.client.readiness import ReadinessTracker
from swell.cluster.client.request_state import EngineGone, MigrationReason, Ticket
from swell.cluster.client.router import NoEngine, Router
from swell.cluster.text.detokenizer import Detokenizer, TextStart
from swell.cluster.text.sampling_params import SamplingParams
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.channel import CallTable, ChannelTimeout
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.wire import ClusterView
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)

_FIRST_VIEW_HEARTBEATS = 5
"""Heartbeats for which an ingress that starts waits to hear who is here."""

_STALE_VIEW_HEARTBEATS = 5
"""Heartbeats without a view, after which its reports say nothing about who waits."""


class EngineCallFailed(RuntimeError):
    """An engine's service raised: what it said."""


class AsyncLLM:
    """The engines as one: whoever asks never learns which of them answered, nor that one left.

    `on_limits` is told max_model_len (tokens) and the vocabulary's size with every view.

    Resumption: what an engine held that has left the roster, that replaces a worker while another
    one could compute, that dropped it, or whose messages were lost, is sent to another engine, or
    to the same again, with the outputs that were already seen; that one recomputes them and
    continues. Without an engine a request waits: for `cluster.start_timeout_s` if it had one, else
    for `serve.no_engine_timeout_s`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        config: Config,
        connect: ConnectEngines,
        metrics: PrometheusStats,
        on_limits: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = ClusterView(Roster())
        self.client_index = secrets.randbits(31)
        self.readiness = ReadinessTracker(config.cluster.stall_timeout_s)
        self.has_seen_engine = False
        """There was an engine at some time, so its limits are known."""
        self._config = config
        self._admission = Admission(
            config.serve.max_waiting_requests,
            config.serve.max_waiting_tokens,
            config.serve.ingress_replicas,
        )
        self._clock = clock
        self._metrics = metrics
        self._on_limits = on_limits
        self._processor = OutputProcessor(detokenizer, stats=metrics, clock=clock)
        self._router = Router(config.cache.block_tokens)
        self._tickets: dict[str, Ticket] = {}
        self._attempts: dict[str, Ticket] = {}
        """By the name under which its engine has it."""
        self._calls: CallTable[UtilityOutput] = CallTable()
        self._awaiting_placement: dict[str, asyncio.TimerHandle] = {}
        """Requests that wait for an engine to come, and when they give up."""
        self._awaiting_placement_tokens = 0
        """Of their prompts."""
        self._first_view = asyncio.Event()
        self._view_at_s = clock()
        """When the newest view came."""
        self._log = StructuredLogger("cluster.ingress", client=self.client_index)
        self._client = connect(
            self.client_index,
            heartbeat_s=config.cluster.heartbeat_s,
            on_view=self._on_view,
            on_outputs=self._on_outputs,
            on_gap=lambda engine: self._migrate_all(engine, MigrationReason.MESSAGES_LOST),
            counted=metrics,
        )

    @property
    def active_ranks(self) -> list[int]:
        return self._router.active_ranks

    async def wait_for_view(self) -> None:
        """Until it is known who is here; a coordinator that is away is not waited for long."""
        try:
            async with asyncio.timeout(_FIRST_VIEW_HEARTBEATS * self._config.cluster.heartbeat_s):
                await self._first_view.wait()
        except TimeoutError:
            self._log.warning("the coordinator is silent")

    def check_admission(self) -> None:
        """Raises TooManyWaiting if another request may not wait (see `admission.py`). Those that
        have an engine already, or had one, may."""
        try:
            self._admission.check(self._backlog(), self._clock())
        except TooManyWaiting as refusal:
            self._metrics.refused(refusal.code)
            raise

    def _backlog(self) -> Backlog:
        """By reports; while the coordinator is away, by what this ingress has sent itself: engines
        go on meanwhile, and the last report would refuse everybody until it is back."""
        config, router = self._config, self._router
        is_old = (
            self._clock() - self._view_at_s > _STALE_VIEW_HEARTBEATS * config.cluster.heartbeat_s
        )
        tell = router.own_backlog if is_old else router.backlog
        placed = tell(config.scheduler.max_rows)
        return placed._replace(
            own_requests=placed.own_requests + len(self._awaiting_placement),
            own_tokens=placed.own_tokens + self._awaiting_placement_tokens,
        )

    def submit(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        kind: RequestOutputKind,
        index: int = 0,
        *,
        prompt: str | None = None,
        text_start: TextStart = TextStart.NEW_TEXT,
    ) -> Ticket:
        """Send a request, which gives answer number `index` to its prompt, to an engine, or keep
        it until there is one. Raises NoEngine if there never was one; whatever it raises, nothing
        is left behind."""
        if not self.has_seen_engine:
            raise NoEngine("no engine is ready yet")
        ticket = Ticket(request, kind)
        self._processor.add_request(
            request,
            params,
            kind=kind,
            queue=ticket.collector,
            prompt=prompt,
            index=index,
            text_start=text_start,
        )
        self._tickets[request.request_id] = ticket
        try:
            self._place(ticket)
        except BaseException:
            self.abort([request.request_id])
            raise
        return ticket

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nobody wants these any more; unknown and finished ones are ignored."""
        self._end(self._processor.abort_requests(request_ids, internal=True))

    def expire(self, request_ids: Sequence[str], timeout_s: float) -> None:
        """Their client waits no longer: those that have not ended end with RequestTimedOut."""
        error = RequestTimedOut(timeout_s)
        self._end(self._processor.propagate_error(error, request_ids, FinishReason.ABORT))

    async def call_engine(self, rank: int, method: str, *args: str | int, timeout_s: float) -> Any:
        """Call a service of an engine. Raises EngineCallFailed with what the engine said, and
        TimeoutError when it says nothing in time."""
        member = self.view.roster.find(rank)
        if member is None:
            raise EngineCallFailed(f"engine {rank} has left")
        future: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        call_id = self._calls.open(future, timeout_s)
        self._client.send(EngineId.of(member), UtilityCall(call_id, method, list(args)))
        try:
            # An answer that is there counts, also if the loop was late and its time is over.
            if not (await asyncio.wait({future}, timeout=timeout_s))[0]:
                late = f"engine {rank} did not answer {method!r} within {timeout_s:g} s"
                self._calls.fail(call_id, ChannelTimeout(late))
        finally:
            self._calls.expire()
        answer = await future
        if answer.failure_message is not None:
            raise EngineCallFailed(answer.failure_message)
        return msgspec.msgpack.decode(answer.result)

    async def drain(self) -> None:
        """Until no request is left."""
        await self._processor.wait_for_requests_to_drain()

    def close(self) -> None:
        self._fail(list(self._tickets), EngineGone("the ingress is shutting down"))
        self._client.close()

    # ---------------------------------------------------------------- what comes in

    def _on_view(self, view: ClusterView, lost: Sequence[EngineId]) -> None:
        """Route by the new view; then move what lost engines held, then what those hold that
        compute nothing, then place what waits for an engine."""
        before, self.view = self.view.roster, view
        self._router.update(view)
        self._view_at_s = self._clock()
        self._admission.observe(view, self._view_at_s)
        self.readiness.on_view(view, time.monotonic())
        self._first_view.set()
        members = view.roster.members
        if members:
            self._on_limits(
                min(m.max_model_len for m in members), min(m.vocab_size for m in members)
            )
            self.has_seen_engine = True
        for engine in lost:
            was = before.find(*engine)
            left = was is not None and was.state is MemberState.LEAVING
            self._migrate_all(engine, MigrationReason.LEFT if left else MigrationReason.DIED)
        if self._router.active_ranks:
            for member in members:
                if member.state is MemberState.REPAIRING:
                    self._migrate_all(EngineId.of(member), MigrationReason.REPAIRING)
            for request_id in list(self._awaiting_placement):
                self._place(self._tickets[request_id])

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._calls.answer(message.utility_output.call_id, message.utility_output)
        outputs: list[EngineCoreOutput] = []
        dropped: list[Ticket] = []
        for attempt_id in message.started:
            if attempt_id in self._attempts:
                self._attempts[attempt_id].started = True
        for output in message.outputs:
            ticket = self._attempts.get(output.request_id)
            if ticket is None:
                continue  # of an earlier run
            if output.finish_reason is FinishReason.ABORT:
                # An end that nobody here asked for: an aborted request has no run any more.
                dropped.append(ticket)
            else:
                outputs.append(_with_request_id(ticket.request.request_id, output))
        self._migrate(dropped, MigrationReason.DROPPED)
        result = self._processor.process_outputs(outputs)
        self._abort_in_engines(result.reqs_to_abort)
        for output in outputs:
            if output.request_id not in self._processor.request_states:
                self._forget(output.request_id)
            elif output.new_token_ids:
                self._router.answered(output.request_id)

    # ---------------------------------------------------------------- who is where

    def _place(self, ticket: Ticket) -> None:
        """Begin or continue a request on an engine, or keep it until there is one. What has begun
        may continue anywhere."""
        request_id, begun = ticket.request.request_id, bool(ticket.ranks)
        request = self._processor.request_states[request_id].resubmission()
        if begun:
            request = msgspec.structs.replace(request, data_parallel_rank=None)
        try:
            rank = self._router.choose(
                request_id,
                request.prompt_token_ids + request.output_token_ids,
                salt=request.cache_salt,
                rank=request.data_parallel_rank,
            )
        except NoEngine as error:
            self._await_placement(ticket, str(error))
            return
        self._stop_waiting(request_id)
        member = self.view.roster.find(rank)
        assert member is not None, f"the router chose engine {rank}, which is not here"
        ticket.place(EngineId.of(member), len(request.output_token_ids))
        self._attempts[ticket.attempt_id] = ticket
        self._processor.sent(request_id)
        self._client.send(
            EngineId.of(member),
            msgspec.structs.replace(
                request, request_id=ticket.attempt_id, failed_attempts=ticket.failed_attempts
            ),
        )
        if begun:
            self._metrics.resubmitted()

    def _await_placement(self, ticket: Ticket, reason: str) -> None:
        """Keep a request until an engine comes, but not for ever."""
        request_id = ticket.request.request_id
        if request_id in self._awaiting_placement:
            return
        config = self._config
        begun = bool(ticket.ranks)
        limit_s = config.cluster.start_timeout_s if begun else config.serve.no_engine_timeout_s
        error = NoEngine(f"{reason}; waited {limit_s:g} s for one")
        self._awaiting_placement_tokens += len(ticket.request.prompt_token_ids)
        self._fail_after(limit_s, request_id, error)

    def _fail_after(self, limit_s: float, request_id: str, error: Exception) -> None:
        """A loop that is late for it was stopped: it takes in first what came meanwhile."""
        loop, beat_s = asyncio.get_running_loop(), self._config.cluster.heartbeat_s
        due_s = loop.time() + limit_s

        def give_up() -> None:
            if loop.time() - due_s > beat_s:
                self._fail_after(beat_s, request_id, error)
            else:
                self._fail([request_id], error)

        self._awaiting_placement[request_id] = loop.call_later(limit_s, give_up)

    def _stop_waiting(self, request_id: str) -> None:
        """The request waits no longer."""
        timer = self._awaiting_placement.pop(request_id, None)
        if timer is not None:
            timer.cancel()
            self._awaiting_placement_tokens -= len(
                self._tickets[request_id].request.prompt_token_ids
            )

    def _migrate_all(self, engine: EngineId, reason: MigrationReason) -> None:
        """Continue elsewhere what an engine holds."""
        self._migrate([t for t in self._tickets.values() if t.engine == engine], reason)

    def _migrate(self, tickets: Iterable[Ticket], reason: MigrationReason) -> None:
        """Take requests from their engine, if it is still there, and place them anew."""
        moved = list(tickets)
        if not moved:
            return
        self._log.warning(
            "requests move",
            reason=str(reason),
            rank=moved[0].ranks[-1],
            epoch=self.view.roster.epoch,
            requests=len(moved),
        )
        self._abort_in_engines([ticket.request.request_id for ticket in moved])
        for ticket in moved:
            request_id = ticket.request.request_id
            del self._attempts[ticket.attempt_id]
            self._router.done(request_id)
            given = len(self._processor.request_states[request_id].output_token_ids)
            try:
                ticket.unassign(reason, given)
            except EngineGone as error:
                self._fail([request_id], error)
            else:
                self._place(ticket)

    # ---------------------------------------------------------------- the end

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        self._end(self._processor.propagate_error(error, request_ids))

    def _end(self, request_ids: Sequence[str]) -> None:
        """These have ended here: their engines are to drop them."""
        self._abort_in_engines(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    def _abort_in_engines(self, request_ids: Iterable[str]) -> None:
        """Drop requests where they are; an engine that has left hears nothing."""
        by_engine: dict[EngineId, list[str]] = {}
        for request_id in request_ids:
            ticket = self._tickets[request_id]
            if ticket.engine is not None:
                by_engine.setdefault(ticket.engine, []).append(ticket.attempt_id)
        for engine, run_ids in by_engine.items():
            self._client.send(engine, AbortRequests(run_ids))

    def _forget(self, request_id: str) -> None:
        self._stop_waiting(request_id)
        self._router.done(request_id)
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._attempts.pop(ticket.attempt_id, None)


def _with_request_id(request_id: str, output: EngineCoreOutput) -> EngineCoreOutput:
    """The output under the name that its request has here."""
    if output.request_id == request_id:
        return output
    return msgspec.structs.replace(output, request_id=request_id)
