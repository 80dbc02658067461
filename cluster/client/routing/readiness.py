"""Readiness of engines, as views show it. Pure: the time is an argument.

The coordinator removes silent and stuck engines from the roster, so a fresh view answers most of
the question. This module additionally detects an engine that has work and whose step and layer
counters do not grow: it is reported before it is replaced. An old view says nothing about engines
and does no harm: requests and answers do not pass through the coordinator. Time without views does
not count: an ingress that was suspended, or whose coordinator was, first receives an old view when
it wakes up.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swell.cluster.client.engine_connection import EngineId
from swell.coordinator.monitors.progress_monitor import ProgressMonitor
from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import ClusterView

_PAUSED = "paused"
_SERVING = "serving"
_CHANGES = {"forming": "forming a group", "pausing": "pausing"}
"""State of the group in which no step begins -> what the engines do."""


class ReadyState(msgspec.Struct, frozen=True):
    """Ranks of the engines that can make progress, and the reason why the others cannot."""

    ranks: list[int]
    reason: str
    coordinator_silent: bool


class ReadinessTracker:
    """Tracks the progress of the engines of the newest view."""

    def __init__(self, stall_timeout_s: float, *, shares_experts: bool = False) -> None:
        """`shares_experts`: engines step together, so they have work while any of them has."""
        self._limit_s = stall_timeout_s
        self._shares_experts = shares_experts
        self._monitor: ProgressMonitor[EngineId] = ProgressMonitor(stall_timeout_s)
        self._active: list[EngineId] = []
        self._unreachable: Mapping[EngineId, str] = {}
        self._repairing: list[int] = []
        self._state, self._sleep_level = _SERVING, 0
        self._changing_since_s: float | None = None
        """Since when the group changes, on the clock of the views; None if it does not change."""
        self._last_view_at: float | None = None

    def on_view(self, view: ClusterView, now: float) -> None:
        """Applies a view. An engine may make no progress while it must not compute."""
        members = {EngineId.of(member): member for member in view.roster.members}
        reports = {report.rank: report for report in view.reports.engines}
        self._monitor.advance(now)
        self._monitor.set_subjects(members, now)
        for key, member in members.items():
            report = reports.get(member.rank)
            may_step = member.state is MemberState.ACTIVE and view.reports.state == _SERVING
            if report is not None:
                is_stepping = self._shares_experts and report.wave_phase == Phase.RUNNING
                busy = may_step and (is_stepping or report.running + report.waiting > 0)
                self._monitor.on_report(key, (report.steps, report.progress_counter), now, busy)
        self._active = [k for k, m in members.items() if m.state is MemberState.ACTIVE]
        self._repairing = [m.rank for m in members.values() if m.state is MemberState.REPAIRING]
        self._state, self._last_view_at = view.reports.state, now
        self._sleep_level = view.reports.sleep.level
        if view.reports.state not in _CHANGES:
            self._changing_since_s = None
        elif self._changing_since_s is None:
            self._changing_since_s = self._monitor.read(now)

    def set_unreachable(self, engines: Mapping[EngineId, str]) -> None:
        """Sets the engines that this ingress cannot use, with the reasons; the coordinator may
        report otherwise."""
        self._unreachable = engines

    def check(self, now: float) -> ReadyState:
        """Returns the engines that can make progress now. Time without progress counts only up to
        the newest view: nothing later is known."""
        view_at = now if self._last_view_at is None else self._last_view_at
        without_s = self._monitor.without_progress_s(self._limit_s)
        stuck = {key.rank: without_s[key] for key in self._active if key in without_s}
        reasons = [f"engine {rank} replaces a worker, or wakes up" for rank in self._repairing]
        reasons += [
            f"engine {rank} has work but made no progress for {time_s:.1f} s"
            for rank, time_s in stuck.items()
        ]
        unreachable = {k.rank: self._unreachable[k] for k in self._active if k in self._unreachable}
        reasons += [f"engine {rank} {reason}" for rank, reason in unreachable.items()]
        ranks = [k.rank for k in self._active if k.rank not in stuck and k.rank not in unreachable]
        is_silent = now - view_at > self._limit_s
        if self._changing_since_s is not None and not is_silent:
            changing_s = self._monitor.read(view_at) - self._changing_since_s
            if changing_s > self._limit_s:
                ranks, what = [], _CHANGES[self._state]
                reasons.append(f"the engines have been {what} for {changing_s:.1f} s")
        if self._state == _PAUSED:
            what = f"asleep, level {self._sleep_level}" if self._sleep_level else "paused"
            ranks, reasons = [], [f"{what} by an operator"]
        return ReadyState(ranks, "; ".join(reasons), is_silent)
