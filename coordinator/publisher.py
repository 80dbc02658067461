"""Decides what the coordinator publishes, and when. Pure: the time is an argument.

A change of load is published within `load_report_s` of the first unpublished change, however much
traffic arrives meanwhile: the deadline is set once and never postponed. The same holds for changes
that do not concern one engine, such as a pause. A new roster is published at once, unless another
one was published just before. All reports are published every `heartbeat_s`. With N engines and I
ingresses, the coordinator sends I messages of a few bytes for each engine whose load has changed,
and I messages of all N engines for each heartbeat and each new roster.
"""

from __future__ import annotations

from collections.abc import Callable

from swell.configs.schema import ClusterConfig
from swell.coordinator.roster import Roster
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    EngineLoad,
    EngineLoads,
    EngineReport,
    Publication,
)

MAX_REPORTS_PER_LOAD_REPORT_S = 56
"""Maximum number of reports of all engines together within `load_report_s`: 1120 per second by
default. With more engines, each one reports less often."""

_ROSTER_INTERVAL_S = 0.0005
"""Minimum time between two rosters, per engine in them: engines that join or leave together then
change the roster only once."""


def load_report_s(config: ClusterConfig, engines: int) -> float:
    """Returns the minimum time between two reports of an engine."""
    return config.load_report_s * max(1.0, engines / MAX_REPORTS_PER_LOAD_REPORT_S)


class ViewPublisher:
    """Holds the roster and the newest report of each member, and what of them is not published."""

    def __init__(self, config: ClusterConfig, now: float = 0.0) -> None:
        self._config = config
        self.roster = Roster()
        self._reports: dict[int, EngineReport] = {}
        self._loads: dict[int, EngineLoad] = {}
        """Loads as they were last published."""
        self._changed: dict[int, None] = {}
        """Ranks whose newest report may not be published yet."""
        self._has_new_roster = True
        self._heartbeat_at = self._publish_at = self._next_roster_at = now

    def report(self, report: EngineReport, now: float) -> None:
        """Records a report. Reports of engines outside of the roster are stale and are dropped."""
        if self.roster.find(report.rank) is None:
            return
        if report != self._reports.get(report.rank):
            self._reports[report.rank] = report
            self._changed[report.rank] = None
            if not self._has_new_roster:
                self._publish_at = min(self._publish_at, now + self._config.load_report_s)

    def change(self, step: Callable[[Roster], Roster], now: float) -> Roster:
        """Applies one of the roster's functions and schedules the publication of the result."""
        roster = step(self.roster)
        if roster is not self.roster:
            self.roster = roster
            for table in (self._reports, self._loads, self._changed):
                for rank in [rank for rank in table if roster.find(rank) is None]:
                    del table[rank]
            self._has_new_roster = True
            self._publish_at = max(now, self._next_roster_at)
        return roster

    def wait_s(self, now: float) -> float:
        """Returns the seconds until something must be published."""
        return max(0.0, self._publish_at - now)

    def due(self, now: float, *, has_news: bool = False) -> Publication | None:
        """Returns what must be published now, or None. `has_news`: something that does not concern
        one engine has changed."""
        if has_news:
            self._publish_at = min(self._publish_at, now + self._config.load_report_s)
        if now < self._publish_at:
            return None
        loads = self._take_changed_loads()
        is_whole, self._has_new_roster = self._has_new_roster, False
        if is_whole or has_news or now >= self._heartbeat_at:
            self._heartbeat_at = self._publish_at = now + self._config.heartbeat_s
            if not is_whole:
                return self.reports()
            self._next_roster_at = now + _ROSTER_INTERVAL_S * len(self.roster.members)
            return self.view()
        self._publish_at = self._heartbeat_at
        return EngineLoads(self.roster.epoch, loads) if loads else None

    def _take_changed_loads(self) -> list[EngineLoad]:
        changed, self._changed = self._changed, {}
        loads = [EngineLoad.of(self._reports[rank]) for rank in changed]
        fresh = [load for load in loads if load != self._loads.get(load.rank)]
        self._loads.update({load.rank: load for load in fresh})
        return fresh

    def view(self) -> ClusterView:
        return ClusterView(self.roster, self.reports())

    def reports(self) -> ClusterReports:
        engines = [self._reports[rank] for rank in sorted(self._reports)]
        return ClusterReports(self.roster.epoch, engines)
