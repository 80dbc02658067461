"""Decides when an engine reports its load. Pure."""

from __future__ import annotations

from swell.configs.schema import ClusterConfig


class LoadReporter:
    """Decides when a report is due: within a deadline after a change, otherwise as a heartbeat."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._changed = False
        self._last_at = -1e9

    def changed(self) -> None:
        """Records that something has happened that is not in the last report."""
        self._changed = True

    def reported(self, now: float) -> None:
        self._changed, self._last_at = False, now

    def wait_s(self, now: float, requested_s: float = 0.0) -> float:
        """Returns the time until a report is due: for this long an idle engine may sleep.
        `requested_s`: the interval that the coordinator requests; with many engines, it is longer
        than the configured one."""
        config = self._config
        period_s = config.heartbeat_s
        if self._changed:
            period_s = min(max(config.load_report_s, requested_s), period_s)
        left_s = self._last_at + period_s - now
        return left_s if left_s > 0.0 else 0.0
