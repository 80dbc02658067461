"""An ingress's channels: one to the coordinator, one to each engine; and calls through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

import msgspec

from swell.cluster.client.engine_connection import (
    EngineConnection,
    EngineId,
    OnMessagesLost,
    OnOutputs,
)
from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error_async
from swell.coordinator.call_table import CallTable
from swell.coordinator.channel import (
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    ChannelTimeout,
)
from swell.coordinator.finder import CoordinatorFinder, FindCoordinator, find_nothing
from swell.coordinator.ground import THREADS, Ground
from swell.coordinator.roster import Roster
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    Counts,
    EngineLoad,
    IngressMessage,
    OtherIngressCounts,
    Publication,
    Subscribe,
)
from swell.engine.wire import UtilityCall, UtilityOutput

_MAX_FAILED_VIEWS = 3
"""Views in a row that could not be applied before the ingress ends itself."""
_IDLE_KEEP_ALIVES = 4
"""Keep-alives to an engine that has nothing of this ingress, in the time after which it forgets an
ingress that sends nothing."""


_UNANSWERED_SHARE = 0.5
"""Keep-alives in a row without an answer, in units of those in `silence_s`: more are not excused
while the coordinator is silent."""
_NOT_REACHED = "is not reached by this ingress"
_WAITS = "waits for the coordinator, which is silent"
_NO_ANSWER = "does not answer this ingress, and the coordinator is silent"


OnView = Callable[[ClusterView, list[EngineId]], None]
OnLoads = Callable[[list[EngineLoad]], None]
EnginesInUse = Callable[[], Set[EngineId]]
OnUnreachable = Callable[[Mapping[EngineId, str]], None]
VersionsInUse = Callable[[], list[str]]


class EngineCoreClient(Protocol):
    """An ingress's connections to the engines."""

    def send(self, engine: EngineId, message: Any) -> None:
        """Hand a message to an engine; dropped if the engine has left."""

    def close(self) -> None: ...


class MetricsExchange(Protocol):
    """The counters of an ingress, and the sum of those of all others."""

    def counts(self) -> Counts: ...

    def set_other_counts(self, counts: Counts) -> None: ...


class ConnectEngines(Protocol):
    """Opens the connections; the callbacks are described at `AsyncEngineCoreClient`."""

    def __call__(
        self,
        client_index: int,
        *,
        heartbeat_s: float,
        silence_s: float,
        on_view: OnView,
        on_loads: OnLoads,
        on_outputs: OnOutputs,
        on_messages_lost: OnMessagesLost,
        on_unreachable: OnUnreachable,
        engines_in_use: EnginesInUse,
        versions_in_use: VersionsInUse,
        metrics: MetricsExchange,
    ) -> EngineCoreClient: ...


class AsyncEngineCoreClient:
    """Follows the roster: connects to engines that came, and disconnects from those that left.

    The callbacks run in the event loop, one at a time: `on_view` with each view of the coordinator
    and the engines that have left, from which no message comes afterwards; `on_loads` with loads
    that have changed since, of engines of the newest view; `on_outputs` with each
    message of an engine; `on_messages_lost` where messages to or from an engine were lost, which
    has dropped its requests then, or will do so as soon as it can be reached; `on_unreachable` with
    all engines that this ingress cannot use, and why, when they change. It has not reached them for
    `silence_s`, or they say that they wait for a silent coordinator. While the coordinator reports,
    it finds engines that compute nothing; while it is silent, they are those that do not answer.

    Every `heartbeat_s` the coordinator gets the newest epoch that was seen, the counters of this
    ingress and the versions by which its answers have begun (`versions_in_use`), and each engine
    that has something of it (`engines_in_use`) a keep-alive; other engines get one before they
    forget it. The coordinator answers with the counters of all other
    ingresses (`metrics`). From the same message a coordinator that was started again at its address
    learns its subscribers, and the epoch from which to continue. What it sends about an older
    epoch is dropped; at the first message about a newer one whose view is missing, that view is
    requested. After `silence_s` without a message it is looked for elsewhere, with `find`.
    """

    def __init__(
        self,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        client_index: int,
        *,
        heartbeat_s: float,
        silence_s: float,
        on_view: OnView,
        on_loads: OnLoads,
        on_outputs: OnOutputs,
        on_messages_lost: OnMessagesLost,
        on_unreachable: OnUnreachable,
        engines_in_use: EnginesInUse,
        versions_in_use: VersionsInUse,
        metrics: MetricsExchange,
        ground: Ground = THREADS,
        find: FindCoordinator = find_nothing,
    ) -> None:
        self._ground = ground
        self._keys = keys
        self._address = coordinator
        self._finder = CoordinatorFinder(ground, find, silence_s)
        self._client_index = client_index
        self._heartbeat_s = heartbeat_s
        self._on_view, self._on_loads = on_view, on_loads
        self._on_outputs = on_outputs
        self._on_messages_lost = on_messages_lost
        self._on_unreachable = on_unreachable
        self._engines_in_use = engines_in_use
        self._versions_in_use = versions_in_use
        self._metrics = metrics
        self._silence_s = silence_s
        self._idle_s = silence_s / _IDLE_KEEP_ALIVES
        self._connections: dict[EngineId, EngineConnection] = {}
        self._unreachable: dict[EngineId, str] = {}
        """Why they cannot be used."""
        self._max_unanswered = _UNANSWERED_SHARE * silence_s / heartbeat_s
        self._roster = Roster()
        self._epoch_requested = 0
        """The newest of which the view was requested."""
        self._outlet = self._connect()
        self._lost: list[EngineId] = []
        """Engines that have left, until `on_view` has returned."""
        self._failed_views = 0
        self._log = StructuredLogger("cluster.link")
        self._heartbeat_task = asyncio.create_task(
            exit_on_error_async(self._heartbeat_loop, "ingress: heartbeat")
        )

    def _connect(self) -> AsyncOutlet[IngressMessage]:
        return self._ground.async_outlet(
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
            versions = self._versions_in_use()
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
        now, closely = self._ground.now(), self._engines_in_use() | self._unreachable.keys()
        unreachable = {}
        for engine, connection in self._connections.items():
            unreached_s = connection.check(now, 0.0 if engine in closely else self._idle_s)
            reason = _NOT_REACHED if unreached_s > self._silence_s else self._fault(engine)
            if reason is not None:
                unreachable[engine] = reason
        if unreachable != self._unreachable:
            self._unreachable = unreachable
            self._on_unreachable(unreachable)

    def _fault(self, engine: EngineId) -> str | None:
        """Why an engine that is connected cannot be used. One that did not answer while the
        coordinator was silent has to answer first."""
        connection = self._connections[engine]
        if connection.waits_for_coordinator:
            return _WAITS
        is_suspect = self._finder.is_silent or engine in self._unreachable
        if is_suspect and connection.num_unanswered > self._max_unanswered:
            return _NO_ANSWER
        return None

    def _on_message(self, message: IngressMessage) -> None:
        """A message that cannot be handled affects no other. Views are repeated with each
        heartbeat; an ingress that fails to apply several in a row does not know where its requests
        are, and ends."""
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
            self._apply_view(message.view(self._roster))
        else:
            self._on_loads(message.loads)

    def _request_view(self, epoch: int) -> None:
        """Its message was lost. It is requested once, and again with each heartbeat."""
        if epoch > self._epoch_requested:
            self._epoch_requested = epoch
            self._outlet.send(Subscribe(self._client_index, self._roster.epoch))

    def _apply_view(self, view: ClusterView) -> None:
        self._on_view(view, list(self._lost))
        self._lost.clear()
        self._failed_views = 0

    def _apply_roster(self, roster: Roster) -> None:
        """Follow it: `on_view` is called with it next. If it fails, the view comes again."""
        members = {EngineId.of(member): member for member in roster.members}
        for engine in [engine for engine in self._connections if engine not in members]:
            self._lost.append(engine)
            self._connections.pop(engine).close()
        for engine, member in members.items():
            if engine not in self._connections:
                self._connections[engine] = EngineConnection(
                    self._ground, member, self._keys, self._on_outputs, self._on_messages_lost
                )
        self._roster = roster


class EngineCallFailed(RuntimeError):
    """An engine's service raised; the message is the engine's."""


class EngineCalls:
    """Calls of engines' services that wait for their answers, each with a deadline."""

    def __init__(self, client: EngineCoreClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._table: CallTable[UtilityOutput] = CallTable(clock)

    async def call(self, engine: EngineId, method: str, args: list[Any], timeout_s: float) -> Any:
        """Raises EngineCallFailed with the engine's message, and TimeoutError without an answer in
        time."""
        future: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        call_id = self._table.open(future, timeout_s)
        self._client.send(engine, UtilityCall(call_id, method, args))
        try:
            # An answer that is there counts, also if the loop was late and its time is over.
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
