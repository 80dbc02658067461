"""The monitor of stopped workers: heartbeat times in, ranks out."""

from __future__ import annotations

from swell.engine.executor.worker_monitor import WorkerMonitor

LIMIT_S = 4.0
CHECK_S = LIMIT_S / 8


def stops_found(
    until_s: float,
    *,
    silent: dict[int, float] | None = None,
    stuck_from_s: float = 1e9,
    step_from_s: float | None = None,
    sleeps: tuple[float, float] = (1e9, 1e9),
    ranks: int = 3,
) -> dict[float, set[int]]:
    """Returns the ranks that the monitor finds, by time. `silent`: rank -> its last heartbeat.
    Progress counters grow by two a second, that of rank 2 by one, until `stuck_from_s`. `sleeps`:
    from when until when the monitor's process is stopped."""
    monitor, found, now = WorkerMonitor(LIMIT_S), {}, 0.0
    while now <= until_s:
        if not sleeps[0] <= now < sleeps[1]:
            for rank in range(ranks):
                if now <= (silent or {}).get(rank, 1e9):
                    monitor.on_heartbeat(rank, int(min(now, stuck_from_s) * (2 - rank // 2)), now)
            if step_from_s is not None and now >= step_from_s:
                monitor.awaiting_step(step_from_s)
            if stopped := monitor.check(now):
                found[now] = set(stopped)
        now += CHECK_S
    return found


def test_no_worker_with_heartbeats_is_found():
    assert stops_found(100.0) == {}, "idle"
    assert stops_found(100.0, step_from_s=1.0) == {}, "a slow step: layers are computed"
    assert stops_found(100.0, stuck_from_s=3.0) == {}, "idle workers compute nothing"


def test_silence_is_detected_after_the_limit_and_in_one_check():
    found = stops_found(20.0, silent={0: 3.0, 2: 3.0}, step_from_s=1.0)
    first = 3.0 + LIMIT_S + CHECK_S
    assert min(found) == first
    assert set(map(frozenset, found.values())) == {frozenset({0, 2})}
    assert found == stops_found(20.0, silent={0: 3.0, 2: 3.0}), "with or without a step"


def test_the_slowest_worker_is_stuck():
    found = stops_found(30.0, stuck_from_s=10.0, step_from_s=5.0)
    assert min(found) == 10.0 + 2 * LIMIT_S + CHECK_S
    assert set(map(frozenset, found.values())) == {frozenset({2})}


def test_a_step_has_the_whole_limit_from_its_start():
    assert (
        min(stops_found(40.0, stuck_from_s=0.0, step_from_s=20.0)) == 20.0 + 2 * LIMIT_S + CHECK_S
    )


def test_a_silent_worker_is_found_and_not_the_workers_that_wait_for_it():
    found = stops_found(30.0, silent={1: 10.0}, stuck_from_s=10.0, step_from_s=5.0)
    assert set(map(frozenset, found.values())) == {frozenset({1})}


def test_a_monitor_that_slept_finds_no_worker_when_it_wakes():
    assert stops_found(100.0, sleeps=(10.0, 60.0), step_from_s=1.0) == {}
    found = stops_found(100.0, sleeps=(10.0, 60.0), silent={1: 30.0})
    assert min(found) > 60.0 + LIMIT_S * 3 / 4, "of the sleep a quarter of the limit counts"
    stuck = stops_found(100.0, sleeps=(10.0, 60.0), stuck_from_s=9.0, step_from_s=1.0)
    assert min(stuck) > 60.0 + 2 * LIMIT_S * 3 / 4


def test_a_repeatedly_sleeping_monitor_finds_no_worker():
    """A monitor that is stopped repeatedly, each time for less than half of the limit and without
    reading a heartbeat in between, finds no worker."""
    monitor = WorkerMonitor(LIMIT_S)
    monitor.on_heartbeat(0, 1, 0.0)
    monitor.check(0.0)
    assert [monitor.check(sleep * 0.45 * LIMIT_S) for sleep in (1, 2, 3)] == [{}, {}, {}]


def test_silent_workers_are_found_even_by_a_monitor_that_is_always_late():
    monitor, found = WorkerMonitor(LIMIT_S), {}
    monitor.on_heartbeat(1, 1, 0.0)
    for sleep in range(1, 7):
        monitor.on_heartbeat(0, sleep, sleep * 10 * LIMIT_S)
        found |= monitor.check(sleep * 10 * LIMIT_S)
    assert set(found) == {1}


def test_a_new_worker_does_not_count_as_slow_and_progress_never_decreases():
    monitor, now = WorkerMonitor(LIMIT_S), 0.0
    for rank, progress_counter in ((0, 100), (1, 90)):
        monitor.on_heartbeat(rank, 0, now)
        monitor.on_heartbeat(rank, progress_counter, now)
    assert monitor.progress_counter == 190
    monitor.forget(1)
    assert monitor.ranks == {0}
    monitor.on_heartbeat(1, 0, now)
    monitor.groups_formed()
    monitor.on_heartbeat(0, 103, now)
    monitor.on_heartbeat(1, 5, now)
    assert monitor.progress_counter == 198
    monitor.awaiting_step(now)
    found = {}
    while not found:
        now += CHECK_S
        monitor.on_heartbeat(0, 103, now)
        monitor.on_heartbeat(1, 5, now)
        found = monitor.check(now)
    assert set(found) == {0}


def test_a_worker_that_does_not_leave_its_groups_is_caught_unless_it_still_computes():
    """A worker that does not leave its groups is found unless it still computes. Worker 0 forms
    groups and waits there, 1 computes a long step, 2 is stuck in its own step."""
    monitor, now, found = WorkerMonitor(LIMIT_S), 0.0, {}
    monitor.on_heartbeat(2, 0, now, generation=1)
    monitor.forming(2, now)
    while not found:
        monitor.on_heartbeat(0, 7, now, generation=2)
        monitor.on_heartbeat(1, int(now), now, generation=1)
        monitor.on_heartbeat(2, 7, now, generation=1)
        found = monitor.check(now)
        now += CHECK_S
    assert set(found) == {2}
    assert now - CHECK_S > LIMIT_S
    monitor.groups_formed()
    assert monitor.check(now) == {}
