"""An ingress follows the coordinator's publications: whole views, and changes since the last
one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.coordinator.roster import Member, MemberState, Roster, update_members
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    EngineLoad,
    EngineLoads,
    EngineReport,
    Subscribe,
)
from swell.engine.wire import EngineCoreOutputs, KeepAlive, KeepAliveReply

ADDRESS = ChannelAddress("machine", "ipc://@a", "tcp://127.0.0.1:1")
KEYS = ChannelKeys(b"", b"")
HEARTBEAT_S, SILENCE_S = 0.01, 0.4


class Outlet:
    identity = b"outlet"

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take, self.sent = take, []
        self.closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def is_connected(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class Ingress(ThreadRuntime):
    """A client whose channels lead nowhere, and everything it reports. Use it in an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.outlets: list[Outlet] = []
        self.views: list[tuple[ClusterView, list[EngineId]]] = []
        self.loads: list[list[EngineLoad]] = []
        self.in_use: frozenset[EngineId] = frozenset()
        self.unreachable: Mapping[EngineId, str] = {}
        self.num_unreachable_calls = 0
        self.client = AsyncEngineCoreClient(
            ADDRESS,
            KEYS,
            0,
            self,
            self,
            heartbeat_s=HEARTBEAT_S,
            silence_s=SILENCE_S,
            runtime=self,
        )

    def on_view(self, view: ClusterView, lost: list[EngineId]) -> None:
        self.views.append((view, lost))

    def on_loads(self, loads: Sequence[EngineLoad]) -> None:
        self.loads.append(list(loads))

    def on_outputs(self, message: EngineCoreOutputs) -> None: ...

    def on_messages_lost(self, engine: EngineId) -> None: ...

    def engines_in_use(self) -> frozenset[EngineId]:
        return self.in_use

    def versions_in_use(self) -> list[str]:
        return []

    def on_unreachable(self, engines: Mapping[EngineId, str]) -> None:
        self.unreachable = dict(engines)
        self.num_unreachable_calls += 1

    def counts(self) -> dict[str, list[float]]:
        return {}

    def set_other_counts(self, counts: Any) -> None: ...

    def async_outlet(self, address: Any, message_type: Any, keys: Any, take: Any) -> Any:
        self.outlets.append(Outlet(take))
        return self.outlets[-1]

    @property
    def coordinator(self) -> Outlet:
        return self.outlets[0]

    def asked(self) -> list[int]:
        """Returns and clears the epochs of the subscriptions sent so far."""
        sent, self.coordinator.sent = self.coordinator.sent, []
        return [message.epoch for message in sent if isinstance(message, Subscribe)]


def roster(epoch: int, *ranks: int) -> Roster:
    return Roster(epoch, tuple(Member(rank, ADDRESS, incarnation=rank) for rank in ranks))


def test_reports_and_loads_belong_to_the_current_roster() -> None:
    async def scenario() -> None:
        ingress = Ingress()
        take = ingress.coordinator.take
        take(ClusterView(roster(3, 0, 1)))
        take(EngineLoads(3, [EngineLoad(1, running=2)]))
        assert ingress.loads == [[EngineLoad(1, running=2)]]
        reports = ClusterReports(3, [EngineReport(0)], state="paused")
        take(reports)
        assert ingress.views[-1] == (ClusterView(roster(3, 0, 1), reports), [])
        take(EngineLoads(2, [EngineLoad(1, running=5)]))
        take(ClusterReports(2, [EngineReport(0)]))
        take(ClusterView(roster(2, 0)))
        assert len(ingress.views) == 2 and len(ingress.loads) == 1, "an older epoch counts"
        ingress.client.close()

    asyncio.run(scenario())


def test_a_lost_view_is_requested_at_once_and_only_once() -> None:
    async def scenario() -> None:
        ingress = Ingress()
        take = ingress.coordinator.take
        take(ClusterView(roster(3, 0, 1)))
        assert ingress.asked() == []
        for _ in range(3):
            take(EngineLoads(5, [EngineLoad(2, running=1)]))
            take(ClusterReports(5, [EngineReport(2)]))
        assert ingress.asked() == [3], "its answer is the newest view"
        assert len(ingress.views) == 1 and ingress.loads == []
        take(ClusterView(roster(5, 1, 2)))
        assert ingress.views[-1] == (ClusterView(roster(5, 1, 2)), [EngineId(0, 0)])
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert set(ingress.asked()) == {5}
        ingress.client.close()

    asyncio.run(scenario())


def test_a_roster_that_cannot_be_applied_is_requested_again() -> None:
    async def scenario() -> None:
        ingress = Ingress()
        make = ingress.async_outlet
        ingress.async_outlet = None  # type: ignore[assignment]
        ingress.coordinator.take(ClusterView(roster(3, 0)))
        ingress.async_outlet = make  # type: ignore[method-assign]
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert set(ingress.asked()) == {0}
        ingress.coordinator.take(ClusterView(roster(3, 0)))
        assert [view.roster.epoch for view, _ in ingress.views] == [3]
        ingress.client.close()

    asyncio.run(scenario())


def test_only_engines_in_use_receive_a_keep_alive_per_heartbeat() -> None:
    """Every other engine gets keep-alives often enough that it does not forget the ingress."""

    async def scenario() -> None:
        ingress = Ingress()
        ingress.coordinator.take(ClusterView(roster(1, 0, 1)))
        used, idle = ingress.outlets[1:]
        ingress.in_use = frozenset({EngineId(0, 0)})
        clock, moment = ingress.now, [0.0]
        ingress.now = lambda: moment[0]  # type: ignore[method-assign]
        counts = [0, 0]
        for _ in range(100):
            ingress.client._check_engines()
            for number, outlet in enumerate((used, idle)):
                sent, outlet.sent = outlet.sent, []
                counts[number] += len(sent)
                for message in sent:
                    assert isinstance(message, KeepAlive)
                    outlet.take(KeepAliveReply(message.sent, message.sent, 0))
            moment[0] += SILENCE_S / 40
        assert counts[0] == 100 and 8 <= counts[1] <= 12
        ingress.client.send(EngineId(1, 1), "an abort, say")
        ingress.client._check_engines()
        assert isinstance(idle.sent[-1], KeepAlive), "what was sent may be lost"
        ingress.now = clock  # type: ignore[method-assign]
        ingress.client.close()

    asyncio.run(scenario())


class Heartbeats:
    """An ingress on a scripted clock, and two engines. The first one answers each keep-alive with
    `answer`, or not at all. The second one always answers and does not wait for the coordinator."""

    def __init__(self) -> None:
        self.ingress = Ingress()
        self.answer: bool | None = False
        """`KeepAliveReply.waits_for_coordinator` of the first engine. None: it does not answer."""
        self._time_s = self.ingress.now()
        self.ingress.now = lambda: self._time_s  # type: ignore[method-assign]
        self.ingress.coordinator.take(ClusterView(roster(1, 0, 1)))

    def turn(self, count: int, *, is_coordinator_heard: bool) -> None:
        client = self.ingress.client
        for _ in range(count):
            client._follow_coordinator()
            client._check_engines()
            for outlet, waits in zip(self.ingress.outlets[1:], (self.answer, False), strict=True):
                sent, outlet.sent = outlet.sent, []
                for message in sent if waits is not None else ():
                    outlet.take(KeepAliveReply(message.sent, message.sent, 0, waits))
            if is_coordinator_heard:
                self.ingress.coordinator.take(ClusterView(roster(1, 0, 1)))
            self._time_s += HEARTBEAT_S

    @property
    def unreachable(self) -> list[int]:
        return [engine.rank for engine in self.ingress.unreachable]


_SILENCE_TURNS = int(SILENCE_S / HEARTBEAT_S)


def test_an_engine_that_waits_for_the_coordinator_is_not_used() -> None:
    async def scenario() -> None:
        heartbeats = Heartbeats()
        heartbeats.turn(_SILENCE_TURNS, is_coordinator_heard=True)
        assert heartbeats.unreachable == []
        heartbeats.answer = True
        heartbeats.turn(_SILENCE_TURNS, is_coordinator_heard=True)
        assert heartbeats.unreachable == [0]
        assert "waits for the coordinator" in heartbeats.ingress.unreachable[EngineId(0, 0)]
        heartbeats.answer = False
        heartbeats.turn(2, is_coordinator_heard=True)
        assert heartbeats.unreachable == [], "it is asked with each heartbeat meanwhile"
        heartbeats.ingress.client.close()

    asyncio.run(scenario())


def test_requests_that_cannot_stay_are_looked_at_with_each_heartbeat() -> None:
    """More of them may become able to continue elsewhere while no view arrives."""

    async def scenario() -> None:
        heartbeats = Heartbeats()
        ingress = heartbeats.ingress
        ingress.in_use = frozenset({EngineId(0, 0)})
        heartbeats.turn(3, is_coordinator_heard=True)
        assert ingress.num_unreachable_calls == 0
        heartbeats.answer = True
        heartbeats.turn(4, is_coordinator_heard=True)
        assert ingress.num_unreachable_calls == 3, "with each heartbeat after the first answer"
        heartbeats.answer = False
        heartbeats.turn(4, is_coordinator_heard=True)
        before = ingress.num_unreachable_calls
        assert ingress.unreachable == {}
        repairing = update_members(roster(2, 0, 1), [1], state=MemberState.REPAIRING)
        ingress.coordinator.take(ClusterView(repairing))
        heartbeats.turn(2, is_coordinator_heard=False)
        assert ingress.num_unreachable_calls == before + 2 and ingress.unreachable == {}
        ingress.client.close()

    asyncio.run(scenario())


def test_an_engine_that_was_unresponsive_must_answer_before_it_is_used() -> None:
    """While the coordinator reports, a silent engine may be inside a long step, because the
    coordinator knows its progress. Without the coordinator, the engine must answer first."""

    async def scenario() -> None:
        heartbeats = Heartbeats()
        heartbeats.turn(1, is_coordinator_heard=True)
        heartbeats.answer = None
        heartbeats.turn(2 * _SILENCE_TURNS, is_coordinator_heard=True)
        assert heartbeats.unreachable == []
        heartbeats.turn(_SILENCE_TURNS, is_coordinator_heard=False)
        assert heartbeats.unreachable == [0]
        heartbeats.turn(_SILENCE_TURNS, is_coordinator_heard=True)
        assert heartbeats.unreachable == [0]
        heartbeats.answer = False
        heartbeats.turn(2, is_coordinator_heard=True)
        assert heartbeats.unreachable == []
        heartbeats.ingress.client.close()

    asyncio.run(scenario())


def test_loads_are_the_part_of_a_report_that_routing_uses() -> None:
    report = EngineReport(3, running=1, waiting=2, waiting_tokens=3, kv_usage=0.5, steps=4)
    assert EngineLoad.of(report) == EngineLoad(3, 1, 2, 3, 0.5, 4)
    assert EngineLoad.of(replace(report, progress_counter=9)) == EngineLoad.of(report)


def test_loads_update_the_view() -> None:
    """The view includes an engine whose first report has just arrived."""
    view = ClusterView(
        roster(1, 0, 1, 2),
        ClusterReports(engines=[EngineReport(1, waves=5), EngineReport(2, running=3)]),
    )
    loads = {0: EngineLoad(0, running=1), 1: EngineLoad(1, waiting=2, steps=9)}
    assert view.reports.with_loads(loads).engines == [
        EngineReport(0, running=1),
        EngineReport(1, waiting=2, steps=9, waves=5),
        EngineReport(2, running=3),
    ]
