"""Status of a cluster for operators: the body of `GET /admin/cluster`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.autoscaler import Autoscaler
from swell.cluster.control.plan.backoff import MissingEngine
from swell.cluster.text.json_types import JsonObject
from swell.configs.schema import Config
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


@dataclass(frozen=True)
class ManagerStatus:
    """The state and the plans of the manager."""

    target: int
    """Target number of engines."""
    phase: str
    """Phase of the change of engines."""
    error: str | None
    missing_engine: MissingEngine | None
    """Why engines are missing."""
    leftovers: Leftovers | None
    upgrade: JsonObject
    hang_reports: tuple[str, ...]
    """Files with the state of engines that hung and were terminated, the newest last."""
    scaling: JsonObject
    """The results of `autoscaling`, `pending` and `draining_nodes`."""
    cache_generation: int
    """See `DesiredState`."""


def describe(
    view: ClusterView,
    handles: Mapping[int, EngineHandle],
    coordinator: JsonObject,
    manager: ManagerStatus,
) -> JsonObject:
    """Returns the body. `handles`: serving and starting engines by rank."""
    reports = {report.rank: report for report in view.reports.engines}
    states = {member.rank: member.state for member in view.roster.members}
    missing_engine, leftovers = manager.missing_engine, manager.leftovers
    degraded = missing_engine is not None and missing_engine.exhausted
    return {
        "epoch": view.roster.epoch,
        "wave": view.reports.wave,
        "state": _state(view, manager.target, manager.phase, degraded=degraded),
        "target": manager.target,
        "engines": [
            _engine(handle, str(states.get(rank, "starting")), reports.get(rank))
            for rank, handle in sorted(handles.items())
        ],
        "coordinator": coordinator,
        "rescale": {
            "phase": manager.phase,
            "error": manager.error,
            "failures": missing_engine.times if missing_engine else 0,
            "next_try_s": round(missing_engine.next_try_s, 1) if missing_engine else None,
        },
        "upgrade": manager.upgrade,
        "leftovers": None
        if leftovers is None
        else {
            "names": [*leftovers.names],
            "reason": leftovers.reason,
            "failures": leftovers.failures,
            "next_try_s": round(leftovers.next_try_s, 1),
        },
        "hang_reports": [
            *manager.hang_reports,
            *(report.hang_report for report in view.reports.engines if report.hang_report),
        ],
        "cache_generation": manager.cache_generation,
        **manager.scaling,
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
        "numerics": handle.ready.limits.numerics if handle.ready else "",
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
            "pid": now.pid or None,
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


def autoscaling(policy: Autoscaler, config: Config, now: float) -> JsonObject | None:
    """Returns the status of the autoscaler; None: it is off. Ages are in seconds."""
    if not config.autoscaling.enabled:
        return None
    load, found, last = policy.load, policy.recommendation, policy.decision
    return {
        "min_engines": config.cluster.min_engines,
        "max_engines": config.cluster.max_engines,
        "queue_s": None if load is None else round(load.queue_s, 3),
        "kv_usage": None if load is None else round(load.kv_usage, 4),
        "ttft_s": None if load is None or load.ttft_s is None else round(load.ttft_s, 4),
        "recommended": None if found is None else found.engines,
        "reason": "the load is not known yet" if found is None else found.reason,
        "shrink_after_s": policy.shrink_after_s,
        "last_decision": None
        if last is None
        else {
            "before": last.before,
            "engines": last.engines,
            "reason": last.reason,
            "age_s": round(now - last.at, 1),
        },
    }


def pending(
    starting: Mapping[int, EngineHandle], bundle: Mapping[str, float], count: int
) -> JsonObject | None:
    """Returns the engines that wait for room; None: there are none. `bundle`, `count`: what each
    engine reserves."""
    reasons = {
        rank: handle.waits_for_room
        for rank, handle in sorted(starting.items())
        if handle.waits_for_room is not None and not handle.leaving
    }
    if not reasons:
        return None
    return {
        "ranks": list(reasons),
        "reason": next(iter(reasons.values())),
        "bundles": [dict(bundle) for _ in range(count)],
    }


def draining_nodes(
    engines: Mapping[int, EngineHandle], draining: Mapping[str, float]
) -> list[JsonObject]:
    """Returns the nodes that Ray takes away, and the engines that are still on them."""
    nodes = {rank: handle.ready.node for rank, handle in sorted(engines.items()) if handle.ready}
    return [
        {
            "node": node,
            "left_s": None if math.isinf(left_s) else round(left_s, 1),
            "engines": [rank for rank, where in nodes.items() if where == node],
        }
        for node, left_s in sorted(draining.items())
    ]
