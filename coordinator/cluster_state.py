"""What the coordinator publishes, and when: pure, with time as an argument.

A change is published within `load_report_s` of the first change that is unpublished, however
much traffic arrives meanwhile: the deadline is set once and never pushed back. A new roster is
published at once. Without changes there is a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable

from swell.configs.schema import ClusterConfig
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView, EngineReport


class ClusterState:
    """Roster and the newest report of each member."""

    def __init__(self, config: ClusterConfig, now: float = 0.0) -> None:
        self._config = config
        self.roster = Roster()
        self.wave = 0
        self._reports: dict[int, EngineReport] = {}
        self._publish_at = now

    def report(self, report: EngineReport, now: float) -> None:
        """Reports of engines outside of the roster are stale, and dropped."""
        if report.rank not in self.roster.ranks:
            return
        if report != self._reports.get(report.rank):
            self._reports[report.rank] = report
            self._publish_at = min(self._publish_at, now + self._config.load_report_s)

    def change(self, step: Callable[[Roster], Roster], now: float) -> Roster:
        """Apply one of the roster's functions and publish the result at once."""
        roster = step(self.roster)
        if roster is not self.roster:
            self.roster = roster
            self._reports = {r: p for r, p in self._reports.items() if r in roster.ranks}
            self._publish_at = now
        return roster

    def wait_s(self, now: float) -> float:
        """Seconds until something is due."""
        return max(0.0, self._publish_at - now)

    def due(self, now: float) -> ClusterView | None:
        """The view, if it is time to publish it."""
        if now < self._publish_at:
            return None
        self._publish_at = now + self._config.heartbeat_s
        return self.view()

    def view(self) -> ClusterView:
        return ClusterView(
            self.roster, [self._reports[rank] for rank in sorted(self._reports)], self.wave
        )
