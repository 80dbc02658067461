"""An ingress's ends of the channels: one to the coordinator, one to each engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error_async
from swell.coordinator.channel import AsyncOutlet, ChannelAddress, ChannelKeys
from swell.coordinator.roster import Member
from swell.coordinator.wire import ClusterView, Counts, IngressMessage, Subscribe
from swell.engine.wire import EngineCoreOutputs, KeepAlive

_MAX_FAILED_VIEWS = 3
"""Views in a row that could not be followed before the ingress ends itself."""


class EngineId(NamedTuple):
    """One start of the engine of a rank: its successor at the same rank is another engine."""

    rank: int
    incarnation: int

    @classmethod
    def of(cls, member: Member) -> EngineId:
        return cls(member.rank, member.incarnation)


class SequenceChecker:
    """Follows the count of one engine's messages to us (`EngineCoreOutputs.seq`)."""

    def __init__(self) -> None:
        self._last = 0

    def follows(self, seq: int) -> bool:
        """Whether nothing was lost before this message; a message without a count follows."""
        if seq == 0:
            return True
        whole = seq == self._last + 1
        self._last = seq
        return whole


OnView = Callable[[ClusterView, list[EngineId]], None]
OnOutputs = Callable[[EngineCoreOutputs], None]
OnGap = Callable[[EngineId], None]


class EngineCoreClient(Protocol):
    """An ingress's way to the engines."""

    def send(self, engine: EngineId, message: Any) -> None:
        """Hand a message to an engine; dropped if the engine has left."""

    def close(self) -> None: ...


class MetricsExchange(Protocol):
    """What an ingress has counted, and where it learns what all others have."""

    def counts(self) -> Counts: ...

    def set_other_counts(self, counts: Counts) -> None: ...


class ConnectEngines(Protocol):
    """Opens links; what the callbacks mean is said at `AsyncEngineCoreClient`."""

    def __call__(
        self,
        client_index: int,
        *,
        heartbeat_s: float,
        on_view: OnView,
        on_outputs: OnOutputs,
        on_gap: OnGap,
        counted: MetricsExchange,
    ) -> EngineCoreClient: ...


class _EngineConnection:
    """One engine: an outlet, and the count of what comes from there."""

    def __init__(
        self, member: Member, keys: ChannelKeys, on_outputs: OnOutputs, on_gap: OnGap
    ) -> None:
        self._engine = EngineId.of(member)
        self._sequence = SequenceChecker()
        self._on_outputs = on_outputs
        self._on_gap = on_gap
        self.outlet: AsyncOutlet[EngineCoreOutputs] = AsyncOutlet(
            member.address, EngineCoreOutputs, keys, self._take
        )
        self._log = StructuredLogger("cluster.link", rank=member.rank)

    def close(self) -> None:
        self.outlet.close()

    def _take(self, message: EngineCoreOutputs) -> None:
        if not self._sequence.follows(message.seq):
            self._on_gap(self._engine)
        try:
            self._on_outputs(message)
        except Exception as error:  # the same as a lost message
            self._log.exception("outputs not handled", error)
            self._on_gap(self._engine)


class AsyncEngineCoreClient:
    """Follows the roster: opens links to engines that came, closes those of engines that left.

    The callbacks run in the event loop, one at a time: `on_view` with each view of the coordinator
    and the engines that it no longer has, of which nothing is heard afterwards; `on_outputs` with
    each message of an engine; `on_gap` before it, where messages of that engine were lost.

    Every `heartbeat_s` the coordinator is told the newest epoch that was seen and what this ingress
    has counted, and each engine that we still wait. The coordinator answers with what all others
    have counted (`counted`). One that died and was started again at its address hears so that
    there are watchers, and from which epoch to go on; a view of an older epoch is dropped.
    """

    def __init__(
        self,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        client_index: int,
        *,
        heartbeat_s: float,
        on_view: OnView,
        on_outputs: OnOutputs,
        on_gap: OnGap,
        counted: MetricsExchange,
    ) -> None:
        self._keys = keys
        self._client_index = client_index
        self._heartbeat_s = heartbeat_s
        self._on_view = on_view
        self._on_outputs = on_outputs
        self._on_gap = on_gap
        self._counted = counted
        self._connections: dict[EngineId, _EngineConnection] = {}
        self._epoch = 0
        self._outlet: AsyncOutlet[IngressMessage] = AsyncOutlet(
            coordinator, IngressMessage, keys, self._on_message
        )
        self._lost: list[EngineId] = []
        """Engines that have left, until `on_view` has taken it in."""
        self._failed_views = 0
        self._log = StructuredLogger("cluster.link")
        self._heartbeat_task = asyncio.create_task(
            exit_on_error_async(self._heartbeat_loop, "ingress: heartbeat")
        )

    def send(self, engine: EngineId, message: Any) -> None:
        link = self._connections.get(engine)
        if link is not None:
            link.outlet.send(message)

    def close(self) -> None:
        self._heartbeat_task.cancel()
        self._outlet.close()
        for link in self._connections.values():
            link.close()
        self._connections.clear()

    async def _heartbeat_loop(self) -> None:
        while True:
            self._outlet.send(Subscribe(self._client_index, self._epoch, self._counted.counts()))
            for link in self._connections.values():
                link.outlet.send(KeepAlive())
            await asyncio.sleep(self._heartbeat_s)

    def _on_message(self, word: IngressMessage) -> None:
        """A message that cannot be handled harms no other. Views are repeated with each heartbeat;
        an ingress that can follow none of them does not know where its requests are."""
        try:
            if isinstance(word, ClusterView):
                self._apply_view(word)
                self._failed_views = 0
            else:
                self._counted.set_other_counts(word.counts)
        except Exception as error:
            self._log.exception("not handled", error, kind=type(word).__name__)
            self._failed_views += isinstance(word, ClusterView)
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
                self._connections[engine] = _EngineConnection(
                    member, self._keys, self._on_outputs, self._on_gap
                )
        self._on_view(view, list(self._lost))
        self._lost.clear()
