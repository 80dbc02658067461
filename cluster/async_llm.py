"""Answers for one ingress: places requests on engines, collects what they give, and moves
requests whose engine has gone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from swell.cluster.detokenizer import Detokenizer
from swell.cluster.link import EngineLinks
from swell.cluster.metrics import PrometheusStats
from swell.cluster.output_processor import OutputProcessor
from swell.cluster.outputs import RequestOutput, RequestOutputCollector, RequestOutputKind
from swell.cluster.params import SamplingParams
from swell.cluster.routing.router import NoEngine, Router
from swell.configs.log import FactLogger
from swell.coordinator.channel import CallTable, ChannelAddress, ChannelKeys
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityOutput,
)

_MAX_RESUBMISSIONS = 5
"""A request that outlives so many engines may be what kills them."""


class EngineGone(RuntimeError):
    """A request could not be finished by any engine."""


class EngineCallFailed(RuntimeError):
    """An engine's service raised: what it said."""


class Ticket:
    """One request on its way: its collector, and the engines that served it, in order."""

    def __init__(self, request: EngineCoreRequest, kind: RequestOutputKind) -> None:
        self.request = request
        self.collector = RequestOutputCollector(kind, request.request_id)
        self.ranks: list[int] = []


class AsyncLLM:
    """The engines as one: whoever asks never learns which of them answered, nor that one left.

    `on_limits` is told max_model_len (tokens) and the vocabulary's size with every view.

    Resumption: when an engine leaves the roster, what it held is sent to another one with the
    outputs that were already seen; that one recomputes them and continues.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        block_tokens: int,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        metrics: PrometheusStats,
        on_limits: Callable[[int, int], None],
    ) -> None:
        self.view = ClusterView(Roster())
        self.client_index = secrets.randbits(31)
        self._metrics = metrics
        self._on_limits = on_limits
        self._processor = OutputProcessor(detokenizer, stats=metrics)
        self._router = Router(block_tokens)
        self._tickets: dict[str, Ticket] = {}
        self._calls: CallTable[UtilityOutput] = CallTable()
        self._homeless: list[str] = []
        """Requests that wait for an engine to come."""
        self._log = FactLogger("cluster.ingress", client=self.client_index)
        self._links = EngineLinks(
            coordinator,
            keys,
            self.client_index,
            on_view=self._on_view,
            on_outputs=self._on_outputs,
        )

    @property
    def active_ranks(self) -> list[int]:
        return self._router.active_ranks

    def submit(
        self, request: EngineCoreRequest, params: SamplingParams, kind: RequestOutputKind
    ) -> Ticket:
        """Send a request to an engine. Raises NoEngine; nothing is left behind then."""
        rank = self._router.choose(
            request.request_id,
            request.prompt_token_ids,
            salt=request.cache_salt,
            rank=request.data_parallel_rank,
        )
        ticket = Ticket(request, kind)
        ticket.ranks.append(rank)
        self._tickets[request.request_id] = ticket
        self._processor.add_request(request, params, kind=kind, queue=ticket.collector)
        self._links.send(rank, request)
        return ticket

    async def outputs(self, ticket: Ticket) -> AsyncGenerator[RequestOutput]:
        """What a request gives. A caller that leaves early aborts it."""
        try:
            async for output in ticket.collector:
                yield output
        finally:
            self.abort([ticket.request.request_id])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nobody wants these any more; unknown and finished ones are ignored."""
        ended = self._processor.abort_requests(request_ids, internal=True)
        self._abort_in_engines(ended)
        for request_id in ended:
            self._forget(request_id)

    async def call_engine(self, rank: int, method: str, *args: str | int, timeout_s: float) -> Any:
        """Call a service of an engine. Raises EngineCallFailed with what the engine said, and
        TimeoutError when it says nothing in time."""
        future: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        call_id = self._calls.open(future, timeout_s)
        self._links.send(rank, UtilityCall(call_id, method, list(args)))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        finally:
            self._calls.expire()
        if answer.failure_message is not None:
            raise EngineCallFailed(answer.failure_message)
        return msgspec.msgpack.decode(answer.result)

    async def drain(self) -> None:
        """Until no request is left."""
        await self._processor.wait_for_requests_to_drain()

    def close(self) -> None:
        self._processor.propagate_error(EngineGone("the ingress is shutting down"))
        self._links.close()

    # ---------------------------------------------------------------- what comes in

    def _on_view(self, view: ClusterView, lost: Sequence[int]) -> None:
        """Route by the new view; then move what lost engines held, then what waits for one."""
        self.view = view
        self._router.update(view)
        members = view.roster.members
        if members:
            self._on_limits(
                min(m.max_model_len for m in members), min(m.vocab_size for m in members)
            )
        for rank in lost:
            self._leave(rank)
        if self._homeless and self._router.active_ranks:
            homeless, self._homeless = self._homeless, []
            for request_id in homeless:
                self._resubmit(request_id)

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._calls.answer(message.utility_output.call_id, message.utility_output)
            return
        result = self._processor.process_outputs(message.outputs)
        self._abort_in_engines(result.reqs_to_abort)
        for output in message.outputs:
            if output.request_id not in self._processor.request_states:
                self._forget(output.request_id)
            else:
                self._router.answered(output.request_id)

    def _leave(self, rank: int) -> None:
        """Continue elsewhere what an engine held."""
        moved = [i for i, ticket in self._tickets.items() if ticket.ranks[-1] == rank]
        if moved:
            self._log.warning(
                "engine lost", rank=rank, epoch=self.view.roster.epoch, requests=len(moved)
            )
        for request_id in moved:
            self._router.done(request_id)
            self._resubmit(request_id)

    def _resubmit(self, request_id: str) -> None:
        """Continue a request on another engine, or keep it until there is one."""
        ticket = self._tickets.get(request_id)
        state = self._processor.request_states.get(request_id)
        if ticket is None or state is None:
            return
        if len(ticket.ranks) > _MAX_RESUBMISSIONS:
            error = EngineGone(f"gave up after engines {ticket.ranks} were lost")
            self._processor.propagate_error(error, [request_id])
            self._forget(request_id)
            return
        request = state.resubmission(data_parallel_rank=None)
        tokens = request.prompt_token_ids + request.output_token_ids
        try:
            rank = self._router.choose(request_id, tokens, salt=request.cache_salt)
        except NoEngine:
            self._homeless.append(request_id)
            return
        ticket.ranks.append(rank)
        self._metrics.resubmitted()
        self._links.send(rank, request)

    def _abort_in_engines(self, request_ids: Sequence[str]) -> None:
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._router.rank_of(request_id)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._links.send(rank, AbortRequests(ids))

    def _forget(self, request_id: str) -> None:
        self._router.done(request_id)
        self._tickets.pop(request_id, None)
