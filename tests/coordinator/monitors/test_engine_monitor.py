"""The monitor finds the engines that have stopped; the clock is scripted."""

from __future__ import annotations

from swell.coordinator.monitors.engine_monitor import EngineMonitor
from swell.coordinator.wire import EngineReport

LIMIT_S = 4.0
HEARTBEAT_S = 0.5


def report(
    rank: int, progress_counter: int = 0, busy: bool = False, at_forming: int = 0
) -> EngineReport:
    return EngineReport(
        rank,
        running=int(busy),
        steps=progress_counter,
        progress_counter=progress_counter,
        progress_at_forming=at_forming,
    )


class MonitorSimulation:
    """A simulation of engines that behave as configured, checked every tenth of a second."""

    def __init__(self, *ranks: int) -> None:
        self.now = 0.0
        self.monitor = EngineMonitor(LIMIT_S, self.now)
        self.monitor.set_ranks(set(ranks), self.now)
        self.reports = {rank: report(rank) for rank in ranks}
        self.silent: set[int] = set()
        self.moving: set[int] = set()
        self.found: list[tuple[float, int]] = []

    def run(self, seconds: float, exempt: frozenset[int] = frozenset()) -> None:
        for _ in range(round(seconds * 10)):
            self.now = round(self.now + 0.1, 3)
            for rank, newest in self.reports.items():
                if rank in self.moving:
                    progress_counter = newest.progress_counter + 1
                    newest = self.reports[rank] = report(
                        rank, progress_counter, bool(newest.running)
                    )
                if rank not in self.silent and round(self.now / HEARTBEAT_S, 3).is_integer():
                    self.monitor.on_report(newest, self.now)
            for rank in self.monitor.check(self.now, exempt):
                self.found.append((self.now, rank))
                del self.reports[rank]
                self.monitor.set_ranks(set(self.reports), self.now)


def test_idle_engines_are_never_reported() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.run(60)
    assert not simulation.found


def test_a_silent_engine_is_found_within_the_limit_and_a_heartbeat() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.run(10)
    simulation.silent.add(1)
    simulation.run(10)
    [(at, rank)] = simulation.found
    assert rank == 1 and 10 + LIMIT_S - HEARTBEAT_S <= at <= 10 + LIMIT_S + 0.2


def test_a_silent_new_engine_has_time_to_find_its_coordinator() -> None:
    """An engine that was never heard from has more time than the limit: it must first notice the
    silence, find the coordinator and connect."""
    cluster = MonitorSimulation(0, 1)
    cluster.silent = {0, 1}
    cluster.run(2.5 * LIMIT_S)
    cluster.silent = {1}
    cluster.run(LIMIT_S)
    assert [rank for _, rank in cluster.found] == [1]
    assert cluster.found[0][0] > 3 * LIMIT_S
    cluster.silent = {0}
    cluster.run(1.5 * LIMIT_S)
    assert [rank for _, rank in cluster.found] == [1, 0], "one that was heard has the limit"


def test_an_engine_after_its_hello_has_the_usual_limit() -> None:
    """An engine that has introduced itself is silent after the limit, even if it never sent a
    report."""
    cluster = MonitorSimulation(0, 1)
    cluster.silent = {0, 1}
    cluster.monitor.on_hellos([1, 2], 0.0)
    cluster.run(LIMIT_S + HEARTBEAT_S)
    assert [rank for _, rank in cluster.found] == [1]


def test_slow_work_with_progress_is_not_a_stall() -> None:
    simulation = MonitorSimulation(0)
    simulation.reports[0] = report(0, 0, busy=True)
    # a layer every seven seconds: longer than the limit, shorter than twice the limit
    for _ in range(10):
        simulation.run(7)
        simulation.reports[0] = report(0, simulation.reports[0].progress_counter + 1, busy=True)
    assert not simulation.found


def test_work_without_progress_is_found_after_twice_the_limit() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.moving = {1}
    simulation.reports[0] = report(0, 5, busy=True)
    simulation.reports[1] = report(1, 5, busy=True)
    simulation.run(20)
    [(at, rank)] = simulation.found
    assert rank == 0 and 2 * LIMIT_S <= at <= 2 * LIMIT_S + 2 * HEARTBEAT_S


def test_only_the_slowest_of_mutually_waiting_engines_is_reported() -> None:
    """Only the engine with the fewest steps is named; the two others get the full limit again after
    it has gone."""
    simulation = MonitorSimulation(0, 1, 2)
    for rank, steps in ((0, 9), (1, 7), (2, 9)):
        simulation.reports[rank] = report(rank, steps, busy=True)
    simulation.run(2 * LIMIT_S + 1)
    assert [rank for _, rank in simulation.found] == [1]


def test_a_lower_step_count_of_a_new_engine_is_not_a_stall() -> None:
    """Only the steps that an engine has computed in the current group count."""
    simulation = MonitorSimulation(0, 1)
    simulation.reports[0] = report(0, 1000, busy=True, at_forming=990)
    simulation.reports[1] = report(1, 12, busy=True, at_forming=1)
    simulation.run(2 * LIMIT_S + 1)
    assert [rank for _, rank in simulation.found] == [0]


def test_the_slowest_of_stepping_engines_is_reported_in_any_order_of_reports() -> None:
    """Engines that step together are compared with each other; others are judged one by one."""
    for is_stepping, named in ((True, 0), (False, 1)):
        monitor = EngineMonitor(LIMIT_S, 0.0)
        monitor.set_ranks({0, 1}, 0.0)
        monitor.on_report(report(1, 9, busy=True), 0.0, is_stepping)
        found: list[int] = []
        for tick in range(1, 90):
            now = tick / 10
            if now > 0.7 * LIMIT_S:  # the reports of engine 0 were delayed
                monitor.on_report(report(0, 7, busy=True), now, is_stepping)
            monitor.on_report(report(1, 9, busy=True), now, is_stepping)
            found += monitor.check(now)
        assert found == [named]


def test_exempt_engines_may_make_no_progress_but_not_be_silent() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.reports[0] = report(0, 5, busy=True)
    simulation.silent = {1}
    simulation.run(30, exempt=frozenset({0, 1}))
    assert [rank for _, rank in simulation.found] == [1]


def test_a_resumed_monitor_reports_no_engine() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.run(5)
    simulation.now += 60  # the coordinator is stopped for a minute and receives no reports
    simulation.run(30)
    assert not simulation.found


def test_a_repeatedly_stopped_monitor_reports_no_engine() -> None:
    """A monitor that is stopped repeatedly, each time for less than half of the limit and without
    taking a report in between, names no engine."""
    simulation = MonitorSimulation(0, 1)
    simulation.run(5)
    for _ in range(3):
        simulation.now += 0.45 * LIMIT_S
        assert simulation.monitor.check(simulation.now) == {}
    simulation.run(30)
    assert not simulation.found


def test_dead_engines_are_found_even_by_a_monitor_that_is_always_late() -> None:
    simulation = MonitorSimulation(0, 1)
    simulation.run(5)
    found: list[int] = []
    for _ in range(6):
        simulation.now += 10 * LIMIT_S
        simulation.monitor.on_report(simulation.reports[0], simulation.now)
        found += simulation.monitor.check(simulation.now)
    assert set(found) == {1}
