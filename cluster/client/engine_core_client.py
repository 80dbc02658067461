"""Connections of an ingress: one to the coordinator, one to each engine; and calls through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from swell.cluster.client.engine_connection import EngineConnection, EngineId, EngineListener
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import exit_on_error_async
from swell.coordinator.roster import Roster
from swell.coordinator.transport.channel import (
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    ChannelTimeout,
)
from swell.coordinator.transport.finder import CoordinatorFinder, FindCoordinator, find_nothing
from swell.coordinator.transport.runtime import THREADS, Runtime
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    Counts,
    IngressMessage,
    OtherIngressCounts,
    Publication,
    Subscribe,
)
from swell.engine.wire import UtilityCall, UtilityOutput

M = TypeVar("M")


class CallTable(Generic[M]):
    """Calls that wait for an answer: matched by id, not by order, and each with a deadline."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_id = 0
        self._waiting: dict[int, tuple[float, asyncio.Future[M]]] = {}

    def open(self, future: asyncio.Future[M], timeout_s: float) -> int:
        """Registers a future and returns the id to send with the call."""
        self._next_id += 1
        self._waiting[self._next_id] = (self._clock() + timeout_s, future)
        return self._next_id

    def answer(self, call_id: int, result: M) -> None:
        """Resolves a call. Late answers, and answers to cancelled callers, are dropped."""
        future = self._close(call_id)
        if future is not None:
            future.set_result(result)

    def fail(self, call_id: int, error: Exception) -> None:
        future = self._close(call_id)
        if future is not None:
            future.set_exception(error)

    def _close(self, call_id: int) -> asyncio.Future[M] | None:
        """Removes a call. Returns its future; None: no caller waits for it any more."""
        _deadline, future = self._waiting.pop(call_id, (0.0, None))
        return None if future is None or future.done() else future

    def expire(self, now: float | None = None) -> None:
        """Fails every call whose deadline has passed."""
        now = self._clock() if now is None else now
        for call_id in [i for i, (deadline, _f) in self._waiting.items() if deadline <= now]:
            self.fail(call_id, ChannelTimeout(f"call {call_id} was not answered in time"))


_MAX_FAILED_VIEWS = 3
"""The ingress exits if more than this many views in a row could not be applied."""
_IDLE_KEEP_ALIVES = 4
"""Keep-alives per `silence_s` to an engine that runs no request of this ingress. The engine forgets
an ingress that is silent for that long."""


_UNANSWERED_SHARE = 0.5
"""Limit on keep-alives in a row without an answer while the coordinator is silent, as a share of
the number sent within `silence_s`."""
_NOT_REACHED = "is not reached by this ingress"
_WAITS = "waits for the coordinator, which is silent or has taken it out of its group"
_NO_ANSWER = "does not answer this ingress, and the coordinator is silent"


class EngineCoreClient(Protocol):
    """The connections of an ingress to the engines."""

    def send(self, engine: EngineId, message: Any) -> None:
        """Sends a message to an engine; drops it if the engine has left."""

    def close(self) -> None: ...


class MetricsExchange(Protocol):
    """The counters of an ingress, and the sum over all other ingresses."""

    def counts(self) -> Counts: ...

    def set_other_counts(self, counts: Counts) -> None: ...


class ConnectEngines(Protocol):
    """Opens the connections of the ingress with this `client_index`."""

    def __call__(
        self,
        client_index: int,
        listener: EngineListener,
        metrics: MetricsExchange,
        *,
        heartbeat_s: float,
        silence_s: float,
    ) -> EngineCoreClient: ...


class AsyncEngineCoreClient:
    """Follows the roster: connects to engines that join and disconnects from those that leave.

    An engine is unreachable if this ingress has not reached it for `silence_s`, or if it reports
    that it computes nothing before a command of the coordinator, which is silent or has formed a
    group without it. While the coordinator reports, it detects engines that
    make no progress; while it is silent, engines that do not answer count as unreachable.

    Every `heartbeat_s` this client sends the coordinator the newest epoch that it has seen, the
    counters of this ingress and the versions that its running answers require. Each engine that
    runs requests of this ingress gets a keep-alive; other engines get one before they would forget
    the ingress. The coordinator answers with the counters
    of all other ingresses (`metrics`). A coordinator that restarted at its address learns from the
    same message who subscribes, and from which epoch to continue. Messages about an older epoch are
    dropped. At the first message about a newer epoch whose view is missing, the view is requested.
    After `silence_s` without a message, `find` looks for the coordinator at another address.
    """

    def __init__(
        self,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        client_index: int,
        listener: EngineListener,
        metrics: MetricsExchange,
        *,
        heartbeat_s: float,
        silence_s: float,
        runtime: Runtime = THREADS,
        find: FindCoordinator = find_nothing,
    ) -> None:
        self._runtime = runtime
        self._keys = keys
        self._address = coordinator
        self._finder = CoordinatorFinder(runtime, find, silence_s)
        self._client_index = client_index
        self._heartbeat_s = heartbeat_s
        self._listener = listener
        self._metrics = metrics
        self._silence_s = silence_s
        self._idle_s = silence_s / _IDLE_KEEP_ALIVES
        self._connections: dict[EngineId, EngineConnection] = {}
        self._unreachable: dict[EngineId, str] = {}
        """Unreachable engines, with the reason for each."""
        self._max_unanswered = _UNANSWERED_SHARE * silence_s / heartbeat_s
        self._roster = Roster()
        self._epoch_requested = 0
        """The newest epoch for which the view was requested."""
        self._outlet = self._connect()
        self._lost: list[EngineId] = []
        """Engines that have left and were not yet passed to the listener."""
        self._failed_views = 0
        self._log = StructuredLogger("cluster.link")
        self._heartbeat_task = asyncio.create_task(
            exit_on_error_async(self._heartbeat_loop, "ingress: heartbeat")
        )

    def _connect(self) -> AsyncOutlet[IngressMessage]:
        return self._runtime.async_outlet(
            self._address, IngressMessage, self._keys, self._on_message
        )

    def send(self, engine: EngineId, message: Any) -> None:
        connection = self._connections.get(engine)
        if connection is not None:
            connection.send(message)

    def close(self) -> None:
        self._heartbeat_task.cancel()
        self._outlet.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _heartbeat_loop(self) -> None:
        while True:
            self._follow_coordinator()
            counts = self._metrics.counts()
            versions = self._listener.versions_in_use()
            self._outlet.send(Subscribe(self._client_index, self._roster.epoch, counts, versions))
            self._check_engines()
            await asyncio.sleep(self._heartbeat_s)

    def _follow_coordinator(self) -> None:
        found = self._finder.check()
        if found is None or found.address == self._address or found.keys != self._keys:
            return
        self._outlet.close()
        self._address = found.address
        self._outlet = self._connect()

    def _check_engines(self) -> None:
        now = self._runtime.now()
        closely = self._listener.engines_in_use() | self._unreachable.keys()
        unreachable = {}
        for engine, connection in self._connections.items():
            unreached_s = connection.check(now, 0.0 if engine in closely else self._idle_s)
            reason = _NOT_REACHED if unreached_s > self._silence_s else self._fault(engine)
            if reason is not None:
                unreachable[engine] = reason
        if unreachable or self._unreachable or self._roster.repairing:
            self._unreachable = unreachable
            self._listener.on_unreachable(unreachable)

    def _fault(self, engine: EngineId) -> str | None:
        """Returns why a connected engine cannot be used, or None. An engine that did not answer
        while the coordinator was silent must answer once before it is used again."""
        connection = self._connections[engine]
        if connection.waits_for_coordinator:
            return _WAITS
        is_suspect = self._finder.is_silent or engine in self._unreachable
        if is_suspect and connection.num_unanswered > self._max_unanswered:
            return _NO_ANSWER
        return None

    def _on_message(self, message: IngressMessage) -> None:
        """Handles a message; an error affects only this message. The coordinator repeats the view
        at each heartbeat. If several views in a row cannot be applied, the ingress does not know
        where its requests run, and exits."""
        self._finder.on_message()
        try:
            if isinstance(message, OtherIngressCounts):
                self._metrics.set_other_counts(message.counts)
            else:
                self._on_publication(message)
        except Exception as error:
            self._log.exception("not handled", error, kind=type(message).__name__)
            self._failed_views += not isinstance(message, OtherIngressCounts)
            if self._failed_views > _MAX_FAILED_VIEWS:
                raise

    def _on_publication(self, message: Publication) -> None:
        if isinstance(message, ClusterView):
            if message.roster.epoch >= self._roster.epoch:
                self._apply_roster(message.roster)
                self._apply_view(message)
        elif message.epoch > self._roster.epoch:
            self._request_view(message.epoch)
        elif message.epoch < self._roster.epoch:
            return
        elif isinstance(message, ClusterReports):
            self._apply_view(ClusterView(self._roster, message))
        else:
            self._listener.on_loads(message.loads)

    def _request_view(self, epoch: int) -> None:
        """Requests a view whose message was lost: immediately, then with each heartbeat."""
        if epoch > self._epoch_requested:
            self._epoch_requested = epoch
            self._outlet.send(Subscribe(self._client_index, self._roster.epoch))

    def _apply_view(self, view: ClusterView) -> None:
        self._listener.on_view(view, list(self._lost))
        self._lost.clear()
        self._failed_views = 0

    def _apply_roster(self, roster: Roster) -> None:
        """Connects and disconnects engines; the caller passes the view on next. If this fails, the
        coordinator sends the view again."""
        members = {EngineId.of(member): member for member in roster.members}
        for engine in [engine for engine in self._connections if engine not in members]:
            self._lost.append(engine)
            self._connections.pop(engine).close()
        for engine, member in members.items():
            if engine not in self._connections:
                self._connections[engine] = EngineConnection(
                    self._runtime, member, self._keys, self._listener
                )
        self._roster = roster


class EngineCallFailed(RuntimeError):
    """An engine's service raised an error; the message is the engine's."""


class EngineCalls:
    """Calls of engine services that wait for an answer, each with a deadline."""

    def __init__(self, client: EngineCoreClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._table: CallTable[UtilityOutput] = CallTable(clock)

    async def call(self, engine: EngineId, method: str, args: list[Any], timeout_s: float) -> Any:
        """Calls a service. Raises EngineCallFailed with the engine's message, and TimeoutError if
        no answer arrives in time."""
        future: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        call_id = self._table.open(future, timeout_s)
        self._client.send(engine, UtilityCall(call_id, method, args))
        try:
            # An answer that has arrived counts, even if the event loop was late and the time is
            # over.
            if not (await asyncio.wait({future}, timeout=timeout_s))[0]:
                late = f"engine {engine.rank} did not answer {method!r} within {timeout_s:g} s"
                self._table.fail(call_id, ChannelTimeout(late))
        finally:
            self._table.expire()
        answer = await future
        if answer.failure_message is not None:
            raise EngineCallFailed(answer.failure_message)
        return msgspec.msgpack.decode(answer.result)

    def on_answer(self, answer: UtilityOutput) -> None:
        self._table.answer(answer.call_id, answer)
