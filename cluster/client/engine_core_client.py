"""An ingress's channels: one to the coordinator, one to each engine; and calls through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from swell.coordinator.channel import (
    AsyncOutlet,
    CallTable,
    ChannelAddress,
    ChannelKeys,
    ChannelTimeout,
)
from swell.coordinator.ground import THREADS, Ground
from swell.coordinator.wire import ClusterView, Counts, IngressMessage, Subscribe
from swell.engine.wire import UtilityCall, UtilityOutput

_MAX_FAILED_VIEWS = 3
"""Views in a row that could not be applied before the ingress ends itself."""


OnView = Callable[[ClusterView, list[EngineId]], None]
OnUnreachable = Callable[[frozenset[EngineId]], None]


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
        on_outputs: OnOutputs,
        on_messages_lost: OnMessagesLost,
        on_unreachable: OnUnreachable,
        metrics: MetricsExchange,
    ) -> EngineCoreClient: ...


class AsyncEngineCoreClient:
    """Follows the roster: connects to engines that came, and disconnects from those that left.

    The callbacks run in the event loop, one at a time: `on_view` with each view of the coordinator
    and the engines that have left, from which no message comes afterwards; `on_outputs` with each
    message of an engine; `on_messages_lost` where messages to or from an engine were lost, which
    has dropped its requests then, or will do so as soon as it can be reached; `on_unreachable` with
    all engines that this ingress has not reached for `silence_s`, when they change.

    Every `heartbeat_s` the coordinator gets the newest epoch that was seen and the counters of this
    ingress, and each engine a keep-alive. The coordinator answers with the counters of all other
    ingresses (`metrics`). From the same message a coordinator that was started again at its address
    learns its subscribers, and the epoch from which to continue; a view of an older epoch is
    dropped.
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
        on_outputs: OnOutputs,
        on_messages_lost: OnMessagesLost,
        on_unreachable: OnUnreachable,
        metrics: MetricsExchange,
        ground: Ground = THREADS,
    ) -> None:
        self._ground = ground
        self._keys = keys
        self._client_index = client_index
        self._heartbeat_s = heartbeat_s
        self._on_view = on_view
        self._on_outputs = on_outputs
        self._on_messages_lost = on_messages_lost
        self._on_unreachable = on_unreachable
        self._metrics = metrics
        self._silence_s = silence_s
        self._connections: dict[EngineId, EngineConnection] = {}
        self._unreachable: frozenset[EngineId] = frozenset()
        self._epoch = 0
        self._outlet: AsyncOutlet[IngressMessage] = ground.async_outlet(
            coordinator, IngressMessage, keys, self._on_message
        )
        self._lost: list[EngineId] = []
        """Engines that have left, until `on_view` has returned."""
        self._failed_views = 0
        self._log = StructuredLogger("cluster.link")
        self._heartbeat_task = asyncio.create_task(
            exit_on_error_async(self._heartbeat_loop, "ingress: heartbeat")
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
            self._outlet.send(Subscribe(self._client_index, self._epoch, self._metrics.counts()))
            self._check_engines()
            await asyncio.sleep(self._heartbeat_s)

    def _check_engines(self) -> None:
        now = self._ground.now()
        unreachable = frozenset(
            engine
            for engine, connection in self._connections.items()
            if connection.check(now) > self._silence_s
        )
        if unreachable != self._unreachable:
            self._unreachable = unreachable
            self._on_unreachable(unreachable)

    def _on_message(self, message: IngressMessage) -> None:
        """A message that cannot be handled affects no other. Views are repeated with each
        heartbeat; an ingress that fails to apply several in a row does not know where its requests
        are, and ends."""
        try:
            if isinstance(message, ClusterView):
                self._apply_view(message)
                self._failed_views = 0
            else:
                self._metrics.set_other_counts(message.counts)
        except Exception as error:
            self._log.exception("not handled", error, kind=type(message).__name__)
            self._failed_views += isinstance(message, ClusterView)
            if self._failed_views > _MAX_FAILED_VIEWS:
                raise

    def _apply_view(self, view: ClusterView) -> None:
        if view.roster.epoch < self._epoch:
            return
        self._epoch = view.roster.epoch
        members = {EngineId.of(member): member for member in view.roster.members}
        for engine in [engine for engine in self._connections if engine not in members]:
            self._lost.append(engine)
            self._connections.pop(engine).close()
        for engine, member in members.items():
            if engine not in self._connections:
                self._connections[engine] = EngineConnection(
                    self._ground, member, self._keys, self._on_outputs, self._on_messages_lost
                )
        self._on_view(view, list(self._lost))
        self._lost.clear()


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
