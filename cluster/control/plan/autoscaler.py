"""Autoscaling policy: the number of engines that the load requires. Pure: time is an argument.

Each observation gives a recommendation:

    a signal above its target      more engines in proportion, at most twice those that serve
    all far below their targets    as few as fit the load with headroom, at least half of them
    anything between               the current target

The target moves when all recommendations of a period agree (*stabilization*, as in the autoscaler
of Kubernetes):

             now - shrink_after_s               now - grow_after_s      now
      4                                               x   x x   x x x x     grows to the
      3                                                 x     x             least of these
      2 ----- target ------------------------------------------------------
      1      o o o o o o o o o o o o o o o o o o o o o o o o o o o o o o    shrinks to the
                                                                            greatest of these

Every change of the target, also by an operator, restarts both periods. If the target grows soon
after it shrank, the shrink was wrong, and the period until the next shrink doubles: a load that
oscillates more slowly than `shrink_after_s` keeps its engines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swell.cluster.control.plan.load_signals import Load
from swell.configs.autoscaling import AutoscalingConfig

LOW = 0.7
"""Engines are removed only if the remaining ones would have at most this share of each target."""
_FACTOR = 2.0
"""Largest growth in one step, and largest shrink, as a factor of the serving engines. New engines
change the load before the next growth."""
DRAIN_S = 30.0
"""A queue that empties within this time is left over from a load that the engines can now serve."""
_SOON = 2.0
"""A growth within this multiple of the time until a shrink shows that the shrink was wrong."""
MAX_CAUTION = 16
"""The longest period until a shrink, in units of `shrink_after_s`."""
_GAP_S = 15.0
"""After a gap without observations longer than this, earlier recommendations are discarded."""


@dataclass(frozen=True)
class Recommendation:
    engines: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """One change of the target."""

    before: int
    engines: int
    reason: str
    at: float


def recommend(load: Load, target: int, config: AutoscalingConfig, max_rows: int) -> Recommendation:
    """Returns how many engines this load requires, regardless of the limits. `max_rows`: batch
    slots of an engine."""
    queue = load.queue_s / config.queue_s
    if load.drained_s < DRAIN_S:
        queue = min(queue, 1.0)
    latencies = [(queue, f"requests wait {load.queue_s:.1f} s for a slot")]
    if config.ttft_s is not None and load.ttft_s is not None:
        text = f"nine of ten requests have their first token within {load.ttft_s:.2f} s"
        latencies.append((load.ttft_s / config.ttft_s, text))
    blocks = load.kv_usage / config.kv_usage, f"{load.kv_usage:.0%} of the KV blocks are in use"
    ratio, reason = max(*latencies, blocks)
    if ratio > 1.0:
        more = math.ceil(load.engines * min(ratio, _FACTOR))
        return Recommendation(max(target, more), reason)
    fitting = _fitting(load, config, max_rows)
    if max(latencies)[0] > LOW or fitting >= target:
        return Recommendation(target, "the current engines can handle the load")
    return Recommendation(
        max(fitting, math.ceil(load.engines / _FACTOR)),
        f"{load.running} requests run and use {load.kv_usage:.0%} of the KV blocks",
    )


def _fitting(load: Load, config: AutoscalingConfig, max_rows: int) -> int:
    """Returns the smallest number of engines with enough slots and blocks for this load, with
    headroom."""
    slots = (load.running + load.waiting) / (LOW * max_rows)
    blocks = load.kv_usage * load.engines / (LOW * config.kv_usage)
    return max(1, math.ceil(slots), math.ceil(blocks))


class Autoscaler:
    """The policy of one cluster, with its recent recommendations."""

    def __init__(self, config: AutoscalingConfig, min_engines: int, max_engines: int) -> None:
        self._config = config
        self._min, self._max = min_engines, max_engines
        self._target: int | None = None
        """The target at the newest observation."""
        self._recent: deque[tuple[float, Recommendation]] = deque()
        """Recommendations since the target moved, with their times, as far back as a shrink
        considers."""
        self._caution = 1
        """The period until a shrink, in units of `shrink_after_s`."""
        self._shrunk_at = -math.inf
        self.load: Load | None = None
        """The newest load; None: unknown."""
        self.decision: Decision | None = None
        """The last decision."""
        self.grows = 0
        self.shrinks = 0
        """Decisions so far."""

    @property
    def shrink_after_s(self) -> float:
        return self._config.shrink_after_s * self._caution

    @property
    def recommendation(self) -> Recommendation | None:
        """The newest recommendation; None: the target has just moved, or the load is unknown."""
        return self._recent[-1][1] if self._recent else None

    def observe(self, load: Load, target: int, max_rows: int, now: float) -> Decision | None:
        """Records an observation and returns a decision if the target must move. `target`: the
        current target; `max_rows`: as for `recommend`. The caller carries out a returned decision:
        the next observation has its target."""
        recent = self._recent
        if target != self._target or (recent and now - recent[-1][0] > _GAP_S):
            recent.clear()
        self.load, self._target = load, target
        found = recommend(load, target, self._config, max_rows)
        engines = min(max(self._min, found.engines), self._max)
        recent.append((now, Recommendation(engines, found.reason)))
        while len(recent) > 1 and recent[1][0] <= now - self.shrink_after_s:
            recent.popleft()
        agreed = self._agreed_growth(target, now) or self._agreed_shrink(target, now)
        return None if agreed is None else self._decide(target, agreed, now)

    def reset(self) -> None:
        """Forgets the load, because it is unknown."""
        self._recent.clear()
        self.load = None

    def _agreed_growth(self, target: int, now: float) -> Recommendation | None:
        late = self._agreed(self._config.grow_after_s, now, lambda engines: engines > target)
        return min(late, key=_engines, default=None)

    def _agreed_shrink(self, target: int, now: float) -> Recommendation | None:
        late = self._agreed(self.shrink_after_s, now, lambda engines: engines < target)
        return max(late, key=_engines, default=None)

    def _agreed(
        self, span_s: float, now: float, wants: Callable[[int], bool]
    ) -> list[Recommendation]:
        """Returns the recommendations of the last `span_s` seconds, newest first, and the one
        before them, because a single observation must not decide. Empty if one of them does not
        satisfy `wants`, or if the recommendations do not cover `span_s`."""
        late = []
        for at, found in reversed(self._recent):
            if not wants(found.engines):
                break
            late.append(found)
            if at <= now - span_s:
                return late
        return []

    def _decide(self, target: int, agreed: Recommendation, now: float) -> Decision:
        grows = agreed.engines > target
        if not grows:
            self._shrunk_at = now
        elif self.decision is not None and self.decision.engines < self.decision.before:
            was_soon = now - self._shrunk_at < _SOON * self.shrink_after_s
            doubled, halved = min(2 * self._caution, MAX_CAUTION), max(1, self._caution // 2)
            self._caution = doubled if was_soon else halved
        self.grows += grows
        self.shrinks += not grows
        self._recent.clear()
        self.decision = Decision(target, agreed.engines, agreed.reason, now)
        return self.decision


def _engines(found: Recommendation) -> int:
    return found.engines
