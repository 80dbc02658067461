"""`swell status`, `scale`, `drain`, `pause`, `sleep` and others: the admin API from a shell."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Literal

import msgspec
from msgspec import UnsetType

from swell.cluster.api.admin.change_requests import (
    DrainRequest,
    ScaleRequest,
    SleepRequest,
    UpgradeRequest,
    WeightsRequest,
)
from swell.cluster.api.admin.protocol import Accepted, ClusterState, UpgradeState
from swell.cluster.cli.console import print_table
from swell.cluster.cli.http_client import Client, ServerError
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.schema import load

_POLL_S = 0.2
_UNREACHABLE_S = 10.0
"""How long the server may be unreachable while a change is watched."""


def status(args: argparse.Namespace) -> int:
    client = Client(args.url, args.api_key)
    state = asyncio.run(client.get("/admin/cluster", ClusterState))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
        return 0
    print(f"state {state.state}, {_summary(state)}, coordinator pid {state.coordinator.pid}")
    for line in _notes(state):
        print(line)
    columns = (
        "engine",
        "state",
        "version",
        "node",
        "pid",
        "running",
        "waiting",
        "KV cache",
        "steps",
    )
    rows = [
        (
            engine.rank,
            engine.state,
            engine.version,
            (engine.node or "-")[:12],
            engine.pid or "-",
            engine.running,
            engine.waiting,
            f"{engine.kv_usage:.0%}",
            engine.steps,
        )
        for engine in state.engines
    ]
    print_table("", columns, rows, left=3)
    return 0


def _notes(state: ClusterState) -> Iterator[str]:
    """What happens, and what is wrong, one line each."""
    if state.coordinator.error is not None:
        yield f"coordinator: {state.coordinator.error}"
    yield _phase(state)
    if (missing := state.rescale).failures:
        again = _next_try(missing.next_try_s or 0.0)
        yield f"an engine is missing: {missing.failures} attempts failed, the next one {again}"
    if (room := state.pending) is not None:
        yield f"wait for room: engines {room.ranks} ({room.reason}); each asks for {room.bundles}"
    if (load := state.autoscaling) is not None:
        yield f"autoscaling: {load.min_engines} .. {load.max_engines} engines; {load.reason}"
    for host in state.draining_nodes:
        yield f"host {host.node[:12]} is taken away, engines there: {host.engines}"
    if (left := state.leftovers) is not None:
        again = _next_try(left.next_try_s)
        text = f"left of ended engines: {left.names} ({left.reason})"
        yield f"{text}; {left.failures} attempts to end it failed, the next one {again}"
    if asleep := [engine.rank for engine in state.engines if engine.sleep_level]:
        yield f"asleep: engines {asleep}, level {max(e.sleep_level for e in state.engines)}"
    error = f" ({state.upgrade.error})" if state.upgrade.error else ""
    yield f"version {state.upgrade.version}, upgrade: {state.upgrade.phase}{error}"
    if failures := state.upgrade.failures:
        again = _next_try(state.upgrade.next_try_s or 0.0)
        yield f"a version does not start: {failures} attempts failed, the next one {again}"


def _next_try(wait_s: float) -> str:
    return f"in {wait_s:g} s" if wait_s else "is under way"


def scale(args: argparse.Namespace) -> int:
    request = ScaleRequest(engines=args.engines, drain_timeout_s=args.drain_timeout)
    return _change(args, "/admin/scale", request)


def drain(args: argparse.Namespace) -> int:
    return _change(args, "/admin/drain", DrainRequest(rank=args.rank))


def upgrade(args: argparse.Namespace) -> int:
    """Returns when all engines are of the version. Raises ServerError if it is rolled back, or if
    another one is wanted meanwhile."""
    config = load(args.config, dict(args.set))
    request = UpgradeRequest(config=msgspec.to_builtins(config))
    return _follow_upgrade(args, "/admin/upgrade", request)


def update_weights(args: argparse.Namespace) -> int:
    """The same for weights alone."""
    request = WeightsRequest(path=os.path.abspath(args.path))
    request.check()
    return _follow_upgrade(args, "/admin/update_weights", request)


def _follow_upgrade(args: argparse.Namespace, path: str, request: RequestBody) -> int:
    asyncio.run(_upgrade(Client(args.url, args.api_key), path, request))
    return 0


async def _upgrade(client: Client, path: str, request: RequestBody) -> None:
    accepted = await client.post(path, request, Accepted)
    if accepted.kept:
        print(f"an upgrade does not change {', '.join(accepted.kept)}", flush=True)
    started, reported = time.monotonic(), ""
    while True:
        state = await _get_state(client)
        found, versions = state.upgrade, Counter(engine.version for engine in state.engines)
        counts = ", ".join(f"{count} of {name}" for name, count in sorted(versions.items()))
        line = f"upgrade to {found.version}: {found.phase}; engines: {counts}"
        if line != reported:
            print(f"[{time.monotonic() - started:5.1f} s] {line}", flush=True)
            reported = line
        if _is_upgraded(found, accepted.version):
            return
        await asyncio.sleep(_POLL_S)


def _is_upgraded(found: UpgradeState, version: str | UnsetType) -> bool:
    """Whether all engines are of this version. Raises ServerError if they will not be."""
    if found.version == version:
        return found.phase in ("idle", "failed", "cancelled")
    if found.previous == version:
        match found.phase:
            case "rolling back" | "cancelling":
                return False
            case "failed":
                raise ServerError(f"the upgrade failed: {found.error}")
            case "cancelled":
                raise ServerError("the upgrade was cancelled")
    raise ServerError(f"the upgrade was replaced by another one, to version {found.version}")


def _change(args: argparse.Namespace, path: str, request: RequestBody) -> int:
    request.check()
    asyncio.run(change_engines(Client(args.url, args.api_key), path, request))
    return 0


def _switch(args: argparse.Namespace, path: str, body: RequestBody | None = None) -> int:
    """Request it and show the state after it."""
    asyncio.run(Client(args.url, args.api_key).post(path, body or RequestBody(), Accepted))
    return status(args)


def sleep(args: argparse.Namespace) -> int:
    requests: Literal["wait", "refuse"] = "refuse" if args.refuse else "wait"
    return _switch(args, "/admin/sleep", SleepRequest(level=args.level, requests=requests))


pause = partial(_switch, path="/admin/pause")
resume = partial(_switch, path="/admin/resume")
wake = partial(_switch, path="/admin/wake")


async def change_engines(client: Client, path: str, request: RequestBody) -> ClusterState:
    """Request a change and print its phases until it is over; the state then. Raises ServerError
    if it fails."""
    await client.post(path, request, Accepted)
    started, reported = time.monotonic(), ""
    while True:
        state = await _get_state(client)
        line = f"{_phase(state)}; {_summary(state)}"
        if line != reported:
            print(f"[{time.monotonic() - started:5.1f} s] {line}", flush=True)
            reported = line
        match state.rescale.phase:
            case "failed":
                reason = state.rescale.error or "no reason is known"
                raise ServerError(f"the change failed, {_summary(state)}: {reason}")
            case "idle":
                return state
        await asyncio.sleep(_POLL_S)


async def _get_state(client: Client) -> ClusterState:
    """The cluster's state. The server may be away for a moment: the cluster is changing."""
    deadline = time.monotonic() + _UNREACHABLE_S
    while True:
        try:
            return await client.get("/admin/cluster", ClusterState)
        except ServerError as error:
            passing = error.status is None or error.status >= 500
            if not passing or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL_S)


def _phase(state: ClusterState) -> str:
    reason = state.rescale.error or (state.pending.reason if state.pending else "")
    return f"change of engines: {state.rescale.phase}{f' ({reason})' if reason else ''}"


def _summary(state: ClusterState) -> str:
    active = sum(engine.state == "active" for engine in state.engines)
    return f"epoch {state.epoch}, {active} of {state.target} engines active"
