"""The autoscaling policy on load traces: it follows lasting changes, ignores short ones, and never
flaps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.control.plan.autoscaler import (
    LOW,
    MAX_CAUTION,
    Autoscaler,
    Decision,
    recommend,
)
from swell.cluster.control.plan.load_signals import Load
from swell.configs.autoscaling import AutoscalingConfig

TICK_S = 2.0
"""The interval of the manager's observations."""
ROWS = 10
SERVICE_S = 5.0
"""Seconds per request: with `ROWS` rows, an engine serves two requests per second."""
RATE = ROWS / SERVICE_S
BOOT_S = 40.0
HOUR_S = 3600.0
MIN, MAX = 1, 8
_WINDOW = 5
"""The number of observations that show whether the queue shrinks."""
CONFIG = AutoscalingConfig(enabled=True)


@dataclass
class Run:
    """A fluid model of a cluster: requests arrive at a rate, and each slot serves them at a fixed
    rate."""

    rate: Callable[[float], float]
    """Requests per second as a function of time."""
    config: AutoscalingConfig = CONFIG
    target: int = 1
    decisions: list[Decision] = field(default_factory=list)
    queues_s: list[float] = field(default_factory=list)
    engine_s: float = 0.0
    targets: list[int] = field(default_factory=list)

    def until(self, end_s: float) -> Run:
        policy = Autoscaler(self.config, MIN, MAX)
        ready, present, now = [0.0] * self.target, 0.0, 0.0
        before: deque[float] = deque([0.0] * _WINDOW, _WINDOW)
        while now < end_s:
            now += TICK_S
            present += self.rate(now) * TICK_S
            serving = sum(at <= now for at in ready)
            running = min(present, serving * ROWS)
            waiting = present - running
            started = running / SERVICE_S
            queue_s = waiting / started if started else 0.0
            usage = running / (serving * ROWS) * 0.8
            fell = (before[0] - waiting) / (_WINDOW * TICK_S)
            drained_s = waiting / fell if fell > 0 else math.inf
            before.append(waiting)
            load = Load(serving, round(running), round(waiting), queue_s, drained_s, usage)
            decision = policy.observe(load, self.target, ROWS, now)
            present -= started * TICK_S
            if decision is not None:
                assert decision.before == self.target
                self.decisions.append(decision)
                self.target = decision.engines
                ready = sorted(ready)[: self.target]
                ready += [now + BOOT_S] * (self.target - len(ready))
            self.queues_s.append(queue_s)
            self.engine_s += len(ready) * TICK_S
            self.targets.append(self.target)
        return self

    @property
    def directions(self) -> list[bool]:
        """Whether each run of decisions grows the cluster. Consecutive equal directions are
        merged."""
        found = [decision.engines > decision.before for decision in self.decisions]
        return [grows for i, grows in enumerate(found) if i == 0 or grows != found[i - 1]]


def test_a_burst_grows_the_cluster_and_quiet_shrinks_it() -> None:
    run = Run(lambda now: 6 * RATE if 100 <= now < 1500 else 0.2 * RATE).until(4 * HOUR_S)
    assert run.directions == [True, False]
    assert 6 <= max(run.targets) <= MAX and run.targets[-1] == MIN
    late = [q for i, q in enumerate(run.queues_s) if 600 <= i * TICK_S < 1500]
    assert max(late) < CONFIG.queue_s, "it has grown in time to empty the queue"
    first = run.decisions[0]
    assert first.at >= 100 + CONFIG.grow_after_s and "wait" in first.reason


def test_a_burst_shorter_than_a_growth_changes_nothing() -> None:
    run = Run(lambda now: 3 * RATE if 100 <= now < 103 else 0.0).until(HOUR_S)
    assert run.decisions == []


def test_a_day_is_followed_in_few_steps() -> None:
    """The load varies between a tenth and all of its peak. Requests queue only while the cluster
    grows."""

    def rate(now: float) -> float:
        return MAX * LOW * RATE * (0.55 - 0.45 * math.cos(2 * math.pi * now / (24 * HOUR_S)))

    run = Run(rate, target=1).until(3 * 24 * HOUR_S)
    assert len(run.directions) <= 4 * 3, "up in the morning, down in the evening"
    late = sum(queue_s > CONFIG.queue_s for queue_s in run.queues_s)
    assert late / len(run.queues_s) < 0.01
    always_most = 3 * 24 * HOUR_S * max(run.targets)
    assert run.engine_s < 0.85 * always_most, "it gives engines back at night"


@pytest.mark.parametrize("period_s", [8, 40, 120, 400, 700, 1200, 2400])
def test_a_fluctuating_load_does_not_flap_the_cluster(period_s: int) -> None:
    """A change costs more than the engines that it saves, so a load that soon returns keeps its
    engines."""

    def rate(now: float) -> float:
        return 3.0 * RATE if now % period_s < period_s / 2 else 0.0

    run = Run(rate).until(24 * HOUR_S)
    shrinks = sum(not grows for grows in run.directions)
    assert shrinks <= MAX_CAUTION.bit_length(), run.decisions
    half = [decision for decision in run.decisions if decision.at > 12 * HOUR_S]
    assert half == [], "it comes to rest"


def test_a_load_that_returns_much_later_grows_the_cluster_again() -> None:
    def rate(now: float) -> float:
        return 3.0 * RATE if now % (6 * HOUR_S) < HOUR_S else 0.0

    run = Run(rate).until(24 * HOUR_S)
    assert run.directions.count(True) == 4 and run.targets[-1] == MIN


@settings(max_examples=25)
@given(st.floats(0.0, 1.2 * MAX), st.integers(MIN, MAX))
def test_a_constant_load_reaches_a_constant_size(load: float, target: int) -> None:
    run = Run(lambda _: load * RATE, target=target).until(3 * HOUR_S)
    assert len(run.directions) <= 2
    assert all(decision.at < 1.5 * HOUR_S for decision in run.decisions)
    if load < LOW * MAX:
        assert run.queues_s[-1] < CONFIG.queue_s
    assert run.targets[-1] <= max(1, math.ceil(load / LOW) + 1)


_PIECES = st.lists(
    st.tuples(st.floats(1.0, 2000.0), st.floats(0.0, 2.0 * MAX)), min_size=1, max_size=20
)


@settings(max_examples=60)
@given(_PIECES, st.integers(MIN, MAX))
def test_every_trace_keeps_the_laws(pieces: list[tuple[float, float]], target: int) -> None:
    ends: list[tuple[float, float]] = []
    for length_s, load in pieces:
        ends.append(((ends[-1][0] if ends else 0.0) + length_s, load * RATE))

    def rate(now: float) -> float:
        return next((load for end_s, load in ends if now <= end_s), 0.0)

    run = Run(rate, target=target).until(ends[-1][0])
    last_at = 0.0
    for decision in run.decisions:
        assert MIN <= decision.engines <= MAX and decision.engines != decision.before
        grows = decision.engines > decision.before
        least_s = CONFIG.grow_after_s if grows else CONFIG.shrink_after_s
        assert decision.at - last_at >= least_s, "the target has stood still for as long"
        if grows:
            assert decision.engines <= 2 * decision.before
        else:
            assert decision.engines >= decision.before / 2
        last_at = decision.at


# -------------------------------------------------------------------------------- one observation


@pytest.mark.parametrize(
    ("load", "engines", "reason"),
    [
        (Load(2, running=20, waiting=3, queue_s=1.5), 3, "wait 1.5 s"),
        (Load(2, running=20, waiting=99, queue_s=60.0), 4, "wait 60.0 s"),
        (Load(2, running=20, waiting=99, queue_s=60.0, drained_s=9.0), 2, "can handle"),
        (Load(4, running=20, kv_usage=0.9), 5, "90% of the KV"),
        (Load(2, running=5, ttft_s=0.9), 4, "within 0.90 s"),
        (Load(2, running=5, ttft_s=0.3), 2, "can handle"),
        (Load(4, running=3, kv_usage=0.1), 2, "3 requests run"),
        (Load(4, running=22, kv_usage=0.1), 4, "can handle"),
        (Load(4, running=3, kv_usage=0.5), 4, "can handle"),
        (Load(4, running=3, kv_usage=0.1, queue_s=0.8), 4, "can handle"),
        (Load(1), 1, "can handle"),
    ],
)
def test_a_load_determines_the_recommended_engines(load: Load, engines: int, reason: str) -> None:
    config = AutoscalingConfig(enabled=True, ttft_s=0.4)
    found = recommend(load, load.engines, config, ROWS)
    assert found.engines == engines and reason in found.reason


def test_starting_engines_are_not_requested_twice() -> None:
    """Two engines serve, the target is four, and the queue is as long as before."""
    found = recommend(Load(2, 20, 50, 30.0), 4, CONFIG, ROWS)
    assert found.engines == 4


def test_a_pending_growth_is_cancelled_when_the_load_falls() -> None:
    policy = Autoscaler(CONFIG, MIN, MAX)
    decisions = [policy.observe(Load(1), 4, ROWS, tick * TICK_S) for tick in range(160)]
    [decision] = filter(None, decisions)
    assert decision.engines == 1 and decision.at >= CONFIG.shrink_after_s


def test_a_scale_by_an_operator_restarts_both_delays() -> None:
    policy = Autoscaler(CONFIG, MIN, MAX)
    busy = Load(2, 20, 50, 30.0)
    for tick in range(5):
        assert policy.observe(busy, 2, ROWS, tick * TICK_S) is None
    assert policy.observe(busy, 3, ROWS, 10.0) is None, "an operator has scaled to three"
    later = [policy.observe(busy, 3, ROWS, 10.0 + tick * TICK_S) for tick in range(1, 6)]
    assert later[:-1] == [None] * 4
    assert later[-1] is not None and later[-1].engines == 4


def test_observations_before_a_gap_are_ignored() -> None:
    """The coordinator was away. Ten seconds of load before the gap and one observation after it do
    not count as a minute of load."""
    policy = Autoscaler(CONFIG, MIN, MAX)
    busy = Load(2, 20, 50, 30.0)
    for at in (0.0, 2.0, 4.0, 60.0, 62.0, 64.0):
        assert policy.observe(busy, 2, ROWS, at) is None
    policy.reset()
    assert policy.recommendation is None and policy.load is None
