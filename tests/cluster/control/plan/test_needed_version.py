"""Running answers get an engine of their version, even if there is no room for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.plan.upgrade import UpgradeState
from swell.cluster.control.plan.upgrade_plan import UpgradePlan, plan
from swell.cluster.control.plan.versions import UpgradeRecord, Version
from swell.configs.schema import load
from swell.coordinator.roster import MemberState
from swell.coordinator.wire import EngineReport
from tests.cluster.control.fake_manager import START_S, ManagerHarness, run
from tests.cluster.control.manager.test_manager_upgrade import until

OLD, NEW, NEWEST = "1-configuration", "2-other", "3-newest"
_TICK_S = 0.5
_SOON_S = 200.0
"""Seconds: longer than several drains, starts and waits for room."""


@dataclass(eq=False)
class Answer:
    """An answer that has begun. It makes progress while its ingress has an engine of its
    version."""

    version: str
    left_s: float
    rank: int | None = None


@dataclass(eq=False)
class Ingress:
    """The messages of ingresses and reports of engines about these answers."""

    harness: ManagerHarness
    answers: list[Answer] = field(default_factory=list)
    sends: bool = False
    """Whether a new request arrives with each tick."""
    num_begun: int = 0
    num_waiting: int = 0
    """The number of answers without an engine in the last tick."""

    def begin(self, version: str, seconds: float) -> Answer:
        self.answers.append(Answer(version, seconds))
        self._publish()
        return self.answers[-1]

    async def serve(self) -> None:
        while True:
            self._tick()
            self._publish()
            await asyncio.sleep(_TICK_S)

    def _tick(self) -> None:
        members = [m for m in self._roster if m.rank in self.harness.placement.alive]
        active = [member for member in members if member.state is MemberState.ACTIVE]
        if self.sends and active:
            first = active[self.num_begun % len(active)]
            self.answers.append(Answer(first.version, 2.0))
            self.num_begun += 1
        for answer in self.answers:
            ranks = [m.rank for m in (*active, *members) if m.version == answer.version]
            answer.rank = answer.rank if answer.rank in ranks else next(iter(ranks), None)
            answer.left_s -= _TICK_S if answer.rank is not None else 0.0
        self.answers = [answer for answer in self.answers if answer.left_s > 0.0]
        self.num_waiting = sum(answer.rank is None for answer in self.answers)

    def _publish(self) -> None:
        coordinator = self.harness.coordinator
        coordinator.needed = {answer.version for answer in self.answers}
        coordinator.reports = {
            member.rank: EngineReport(
                member.rank, running=sum(answer.rank == member.rank for answer in self.answers)
            )
            for member in self._roster
        }

    @property
    def _roster(self) -> tuple:
        return self.harness.coordinator.roster.members


async def upgraded(harness: ManagerHarness, *hashes: str) -> Ingress:
    """Upgrades to these versions in turn, so that all engines have the newest, and limits the
    capacity to the current number of engines. Returns the ingress."""
    await harness.start()
    for config_hash in hashes:
        await harness.upgrade(config_hash)
        await harness.settle()
    harness.placement.capacity = len(harness.active)
    ingress = Ingress(harness)
    harness.manager._fleet.tasks.spawn(ingress.serve())
    return ingress


async def ended(*answers: Answer) -> None:
    async with asyncio.timeout(_SOON_S):
        await until(lambda: all(answer.left_s <= 0.0 for answer in answers))


async def is_whole(harness: ManagerHarness, version: str, engines: int) -> None:
    """Checks that the cluster soon has this many engines of the version and then stays so, without
    flapping."""
    async with asyncio.timeout(_SOON_S):
        await until(lambda: harness.versions == [version] * engines)
        await harness.settle()
    starts = len(harness.placement.ranks_of_event("start"))
    await asyncio.sleep(5 * START_S)
    assert harness.versions == [version] * engines
    assert len(harness.placement.ranks_of_event("start")) == starts
    assert len(harness.placement.groups) == engines


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("engines", [2, 3])
def test_one_engine_is_replaced_by_the_needed_version_and_restored(
    engines: int, sends: bool
) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        ingress.sends = sends
        starts = len(harness.placement.ranks_of_event("start"))
        answer = ingress.begin(OLD, 30.0)
        await until(lambda: answer.rank is not None)
        assert harness.versions.count(NEW) == engines - 1
        await ended(answer)
        await is_whole(harness, NEW, engines)
        starts = len(harness.placement.ranks_of_event("start")) - starts
        assert starts == 2, "the other version, and the one that gave way"

    run(scenario, data=engines, drain_timeout_s=5)


@pytest.mark.parametrize("sends", [False, True])
def test_with_room_for_one_engine_versions_take_turns(sends: bool) -> None:
    """The answers that run on one version finish before an engine of the other one starts."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        ingress.sends = sends
        newer, older = ingress.begin(NEW, 60.0), ingress.begin(OLD, 30.0)
        await until(lambda: older.rank is not None)
        assert newer.left_s <= 0.0, "no answer lost its engine"
        await ended(older)
        await is_whole(harness, NEW, 1)

    run(scenario, drain_timeout_s=5)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("room", [0, 1, 2])
@pytest.mark.parametrize("sends", [False, True])
def test_several_versions_take_turns(engines: int, room: int, sends: bool) -> None:
    """`room` is the extra capacity beyond the serving engines. No engine that an answer needs is
    stopped."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other", "newest")
        ingress.sends = sends
        harness.placement.capacity += room
        joins = len(harness.placement.ranks_of_event("join"))
        answers = [ingress.begin(version, 20.0) for version in (OLD, NEW, NEWEST)]
        await ended(*answers)
        await is_whole(harness, NEWEST, engines)
        assert len(harness.placement.ranks_of_event("join")) - joins <= 4

    run(scenario, data=engines, drain_timeout_s=5)


@pytest.mark.parametrize("waits_for_room", [False, True])
def test_a_needed_version_precedes_engines_that_lack_room(waits_for_room: bool) -> None:
    """The target is three, there is room for two, and the third engine is retried or waits."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        harness.placement.capacity = 2
        harness.placement.waits_for_room = waits_for_room
        harness.placement.kill_engine(max(harness.placement.alive))
        await asyncio.sleep(2 * START_S)
        answer = ingress.begin(OLD, 30.0)
        await until(lambda: answer.rank is not None)
        assert sorted(m.version for m in harness.coordinator.roster.members) == [OLD, NEW]
        await ended(answer)
        async with asyncio.timeout(_SOON_S):
            await until(lambda: harness.versions == [NEW] * 2)
        harness.placement.capacity = 3
        await asyncio.sleep(300.0)  # the longest wait between two attempts
        await is_whole(harness, NEW, 3)

    run(scenario, data=3, drain_timeout_s=5)


def test_a_starting_engine_is_removed_before_a_serving_one() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        harness.placement.slow_s = dict.fromkeys(range(4), 500.0)
        harness.placement.kill_engine(min(harness.placement.alive))
        await asyncio.sleep(2.0)
        harness.placement.slow_s.clear()
        answer = ingress.begin(OLD, 30.0)
        await until(lambda: answer.rank is not None)
        assert NEW in harness.versions, "it serves on"
        await ended(answer)
        await is_whole(harness, NEW, 2)

    run(scenario, data=2, drain_timeout_s=5)


def test_an_engine_is_kept_if_its_room_is_no_longer_needed() -> None:
    """The client of the other answer gives up before its turn has come."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        newer, older = ingress.begin(NEW, 100.0), ingress.begin(OLD, 30.0)
        engine = harness.placement.alive[1]
        await until(lambda: harness.active == [])
        older.left_s = 0.0
        await until(lambda: harness.active == [1])
        await ended(newer)
        await is_whole(harness, NEW, 1)
        assert harness.placement.alive == {1: engine}

    run(scenario, drain_timeout_s=5)


@pytest.mark.parametrize("change", ["scale 1", "lose manager", "drain", "kill"])
@pytest.mark.parametrize("after_s", [1.0, 12.0, 25.0])
def test_concurrent_changes_lose_nothing(change: str, after_s: float) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        answer, engines = ingress.begin(OLD, 30.0), 3
        await asyncio.sleep(after_s)
        match change:
            case "scale 1":
                await harness.manager.scale(1)
                engines = 1
            case "lose manager":
                await harness.manager.save()
                await harness.lose_manager()
                await harness.manager.start()
                harness.manager._fleet.tasks.spawn(ingress.serve())
            case "drain":
                harness.manager.drain(harness.active[0])
                engines = 2
            case "kill":
                harness.placement.kill_engine(max(harness.placement.alive))
        await ended(answer)
        await is_whole(harness, NEW, engines)

    run(scenario, data=3, drain_timeout_s=5)


def test_a_version_that_does_not_start_delays_no_other() -> None:
    """The old weights are gone: starts of that version are retried with growing delays, and the
    missing engine is replaced."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        harness.placement.broken = {OLD}
        harness.placement.capacity = 3
        answer = ingress.begin(OLD, 30.0)
        harness.placement.kill_engine(min(harness.placement.alive))
        await asyncio.sleep(3 * START_S)
        assert harness.versions == [NEW] * 2
        before = len(harness.placement.ranks_of_event("start"))
        await asyncio.sleep(600.0)
        tried = len(harness.placement.ranks_of_event("start")) - before
        assert 2 <= tried <= 12
        harness.placement.broken = set()
        async with asyncio.timeout(400.0):
            await until(lambda: answer.left_s <= 0.0)
        await is_whole(harness, NEW, 2)

    run(scenario, data=2, drain_timeout_s=5)


@pytest.mark.parametrize("sends", [False, True])
def test_a_larger_version_uses_the_room_of_several_engines(sends: bool) -> None:
    """The larger engine does not fit into the room of one engine, so the next one gives way too."""

    async def scenario(harness: ManagerHarness) -> None:
        ingress = await upgraded(harness, "other")
        ingress.sends = sends
        placement = harness.placement
        reserve: Callable = placement._reserve

        async def reserve_two(handle, on_waiting) -> None:
            placement.capacity = 1 if handle.version_name == OLD else 2
            await reserve(handle, on_waiting)

        placement._reserve = reserve_two  # type: ignore[method-assign]
        answer = ingress.begin(OLD, 10.0)
        await ended(answer)
        placement._reserve = reserve  # type: ignore[method-assign]
        placement.capacity = 2
        await is_whole(harness, NEW, 2)

    run(scenario, data=2, drain_timeout_s=5)


# -------------------------------------------------------------------------------- one decision

CONFIG = load({"model": {"path": "m"}})
ONE, TWO, THREE = (Version.of(n, name, CONFIG) for n, name in enumerate(("a", "b", "c"), 1))
STATE = UpgradeState(
    UpgradeRecord((ONE, TWO, THREE), THREE.name, TWO.name, proven=(ONE.name, TWO.name, THREE.name))
)


def decide(*engines: EngineStatus, needed: Version | None) -> UpgradePlan:
    names = [] if needed is None else [needed.name]
    return plan(STATE, FleetView(engines), 3, names, 100.0)[1]


def serving(rank: int, version: Version, intent: Intent = Intent.STAY) -> EngineStatus:
    return EngineStatus(rank, Place.SERVING, intent, version=version.name)


def waiting(rank: int, version: Version) -> EngineStatus:
    return EngineStatus(
        rank,
        Place.STARTING,
        waits_for_room=True,
        version=version.name,
        is_extra=True,
        for_answers=True,
    )


def test_an_unneeded_engine_that_waits_for_room_is_cancelled() -> None:
    """The answer has finished, and its version happens to be the target version."""
    fleet = serving(0, THREE), serving(1, TWO), serving(2, TWO), waiting(3, THREE)
    assert decide(*fleet, needed=None).cancel == (3,)


def test_a_needed_version_does_not_wait_for_an_engine_with_its_own_answers() -> None:
    """Another engine can give way at once."""
    held = serving(2, TWO, Intent.DRAIN)
    found = decide(serving(0, THREE), serving(1, THREE), held, waiting(3, ONE), needed=ONE)
    assert found.gives_way == 1 and found.takes_place == 3 and 2 in found.held


def test_the_last_engine_of_the_target_version_is_removed_last() -> None:
    found = decide(serving(0, THREE), serving(1, TWO), waiting(3, ONE), needed=ONE)
    assert found.gives_way == 1
