"""Status of a cluster for operators: the body of `GET /admin/cluster`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.backoff import MissingEngine
from swell.cluster.text.json_types import JsonObject
from swell.coordinator.roster import MemberState
from swell.coordinator.wire import ClusterView, EngineReport
from swell.engine.serving.start_timeline import StartPhase

_STARTING_PROCESS = "starting the process"


@dataclass(frozen=True)
class Leftovers:
    """Actors and placement groups of terminated engines that may still exist in Ray. Their
    termination is retried."""

    names: list[str]
    """Names of these actors and placement groups, as far as they are known."""
    reason: str
    failures: int
    """Failed attempts in a row."""
    next_try_s: float
    """Seconds until the next attempt; 0: an attempt is running."""


def describe(
    view: ClusterView,
    handles: Mapping[int, EngineHandle],
    *,
    coordinator: Mapping[str, Any],
    target: int,
    phase: str,
    error: str | None,
    missing_engine: MissingEngine | None,
    leftovers: Leftovers | None,
    upgrade: Mapping[str, Any],
    **scaling: Any,
) -> dict[str, Any]:
    """Returns the body. `handles`: serving and starting engines by rank. `scaling`: the parts that
    `scaling_status.py` makes."""
    reports = {report.rank: report for report in view.reports.engines}
    states = {member.rank: member.state for member in view.roster.members}
    return {
        "epoch": view.roster.epoch,
        "wave": view.reports.wave,
        "state": _state(
            view, target, phase, degraded=missing_engine is not None and missing_engine.exhausted
        ),
        "target": target,
        "engines": [
            _engine(handle, str(states.get(rank, "starting")), reports.get(rank))
            for rank, handle in sorted(handles.items())
        ],
        "coordinator": dict(coordinator),
        "rescale": {
            "phase": phase,
            "error": error,
            "failures": missing_engine.times if missing_engine else 0,
            "next_try_s": round(missing_engine.next_try_s, 1) if missing_engine else None,
        },
        "upgrade": dict(upgrade),
        "leftovers": None
        if leftovers is None
        else {
            "names": leftovers.names,
            "reason": leftovers.reason,
            "failures": leftovers.failures,
            "next_try_s": round(leftovers.next_try_s, 1),
        },
        **scaling,
    }


def upgrade_error(failed: str | None, found: tuple[str, MissingEngine] | None) -> JsonObject:
    """Returns error, failures and next attempt of an upgrade. `failed`: why the last upgrade
    failed. `found`: a version that does not start now, and why."""
    if found is None:
        return {"error": failed, "failures": 0, "next_try_s": None}
    version, missing_engine = found
    now = f"version {version} does not start: {missing_engine.reason}"
    return {
        "error": "; ".join(filter(None, (failed, now))),
        "failures": missing_engine.times,
        "next_try_s": round(missing_engine.next_try_s, 1),
    }


def _engine(handle: EngineHandle, state: str, report: EngineReport | None) -> JsonObject:
    report = report or EngineReport(handle.rank)
    return {
        "rank": handle.rank,
        "state": state,
        "version": handle.version_name,
        "pid": handle.ready.pid if handle.ready else None,
        "node": handle.ready.node if handle.ready else None,
        "running": report.running,
        "waiting": report.waiting,
        "kv_usage": report.kv_usage,
        "steps": report.steps,
        "epoch": report.epoch,
        "wave": report.wave,
        "repairs": report.repairs,
        "sleep_level": report.sleep_level,
        "freed_bytes": report.freed_bytes,
        "workers": _workers(handle, report),
        "starting": _starting(handle) if state == "starting" else "",
        "start": msgspec.to_builtins(_start(handle)),
    }


def _workers(handle: EngineHandle, report: EngineReport) -> list[JsonObject]:
    """Returns the workers, as the engine has last reported or answered."""
    answer = handle.ready or handle.start_status
    if answer is None:
        return []
    workers, newest = answer.workers, report.workers
    if handle.ready is None or report.incarnation != handle.ready.incarnation or not newest:
        newest = tuple(worker.report for worker in workers)
    return [
        {
            "rank": worker.rank,
            "tensor": worker.tensor,
            "pipeline": worker.pipeline,
            "pid": now.pid,
            "status": now.status.name.lower(),
            "replaced": now.replaced,
        }
        for worker, now in zip(workers, newest, strict=False)
    ]


def _starting(handle: EngineHandle) -> str:
    """Returns what a starting engine is doing."""
    return handle.start_status.text if handle.start_status else _STARTING_PROCESS


def _start(handle: EngineHandle) -> list[StartPhase]:
    """Returns the phases of the engine's start; empty: it has not started."""
    if handle.ready is None:
        return []
    process = [] if handle.process_s is None else [StartPhase(_STARTING_PROCESS, handle.process_s)]
    return [*process, *handle.ready.start]


def _state(view: ClusterView, target: int, phase: str, *, degraded: bool) -> str:
    """Returns the state of the cluster. `failed` if no engine is left, `degraded` if engines are
    missing that cannot be started; both are retried. A cluster that serves after a failed change is
    `serving`; a cluster whose engines are forming their group is `changing`."""
    states = [member.state for member in view.roster.members]
    if not states:
        return "failed" if degraded or phase == "failed" else "starting"
    if view.reports.state == "paused":
        return "paused"
    if degraded:
        return "degraded"
    settled = phase == "failed" or (phase == "idle" and len(states) == target)
    whole = view.reports.state == "serving" and all(state is MemberState.ACTIVE for state in states)
    return "serving" if settled and whole else "changing"
