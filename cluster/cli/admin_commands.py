"""`swell status`, `scale`, `drain`, `pause`, `sleep` and others: the admin API as shell
commands."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from swell.cluster.api.admin.protocol import (
    NOT_STORED,
    Accepted,
    ClusterState,
    EngineState,
    UpgradeState,
)
from swell.cluster.cli.console import print_table
from swell.cluster.cli.http_client import Client, ServerError
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.schema import given_settings

_POLL_S = 0.2
_SWITCH_S = 600.0
"""How long engines may take to fall asleep after their current steps, or to load their weights."""
_STAYS = ("active", "repairing")
"""States of engines that sleep and wake; engines in other states are joining or leaving."""
_UNREACHABLE_S = 10.0
"""How long the server may be unreachable while a change is followed."""


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
    """Yields notes on changes in progress and on problems, one line each."""
    if state.coordinator.error is not None:
        yield f"coordinator: {state.coordinator.error}"
    yield _phase(state)
    if (missing := state.rescale).failures:
        again = _next_try(missing.next_try_s or 0.0)
        yield f"an engine is missing: {missing.failures} attempts failed, the next one {again}"
    if (room := state.pending) is not None:
        yield f"engines that wait for room: {room.ranks} ({room.reason}); each needs {room.bundles}"
    if (load := state.autoscaling) is not None:
        yield f"autoscaling: {load.min_engines} .. {load.max_engines} engines; {load.reason}"
    for host in state.draining_nodes:
        yield f"host {host.node[:12]} is being removed; engines on it: {host.engines}"
    if (left := state.leftovers) is not None:
        again = _next_try(left.next_try_s)
        text = f"left by terminated engines: {left.names} ({left.reason})"
        yield f"{text}; {left.failures} attempts to remove them failed, the next one {again}"
    for file in state.hang_reports:
        yield f"a process of an engine hung; the state of the engine then: {file}"
    classes = sorted({engine.numerics for engine in state.engines if engine.numerics})
    if len(classes) > 1:
        yield f"engines differ in the bits of their results: {', '.join(classes)}"
    if asleep := [engine.rank for engine in state.engines if engine.sleep_level]:
        yield f"asleep: engines {asleep}, level {max(e.sleep_level for e in state.engines)}"
    error = f" ({state.upgrade.error})" if state.upgrade.error else ""
    yield f"version {state.upgrade.version}, upgrade: {state.upgrade.phase}{error}"
    if failures := state.upgrade.failures:
        again = _next_try(state.upgrade.next_try_s or 0.0)
        yield f"a version cannot start: {failures} attempts failed, the next one {again}"


def _next_try(wait_s: float) -> str:
    return f"in {wait_s:g} s" if wait_s else "is in progress"


def scale(args: argparse.Namespace) -> int:
    request = ScaleRequest(engines=args.engines, drain_timeout_s=args.drain_timeout)
    return _change(args, "/admin/scale", request)


def drain(args: argparse.Namespace) -> int:
    return _change(args, "/admin/drain", DrainRequest(rank=args.rank))


def upgrade(args: argparse.Namespace) -> int:
    """Upgrades and waits until all engines run the version. Raises ServerError if the upgrade is
    rolled back or replaced by another one."""
    request = UpgradeRequest(config=given_settings(args.config, dict(args.set)))
    request.check()
    return _follow_upgrade(args, "/admin/upgrade", request)


def update_weights(args: argparse.Namespace) -> int:
    """Like `upgrade`, but only for weights."""
    request = WeightsRequest(path=os.path.abspath(args.path))
    request.check()
    return _follow_upgrade(args, "/admin/update_weights", request)


def _follow_upgrade(args: argparse.Namespace, path: str, request: RequestBody) -> int:
    asyncio.run(_upgrade(Client(args.url, args.api_key), path, request))
    return 0


async def _upgrade(client: Client, path: str, request: RequestBody) -> None:
    accepted = await _request(client, path, request)
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
    """Whether all engines run this version. Raises ServerError if they never will."""
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


async def _request(client: Client, path: str, request: RequestBody) -> Accepted:
    """Requests a change. Says so if it is accepted but not stored."""
    accepted = await client.post(path, request, Accepted)
    if not accepted.stored:
        print(NOT_STORED, file=sys.stderr, flush=True)
    return accepted


def _switch(args: argparse.Namespace, path: str, body: RequestBody | None = None) -> int:
    """Sends the request and shows the state afterwards."""
    asyncio.run(_request(Client(args.url, args.api_key), path, body or RequestBody()))
    return status(args)


def sleep(args: argparse.Namespace) -> int:
    """Waits until all engines sleep at this level or deeper. Raises ServerError after
    `_SWITCH_S`."""
    requests: Literal["wait", "refuse"] = "refuse" if args.refuse else "wait"
    request = SleepRequest(level=args.level, requests=requests)
    return _show_sleep(args, "/admin/sleep", request, lambda e: e.sleep_level >= args.level)


def wake(args: argparse.Namespace) -> int:
    """Waits until all engines are awake. Raises ServerError after `_SWITCH_S`."""
    return _show_sleep(args, "/admin/wake", RequestBody(), _is_awake)


def _is_awake(engine: EngineState) -> bool:
    """Whether an engine is awake. While it wakes up it is `repairing` until its weights are
    loaded."""
    return engine.state == "active" and not engine.sleep_level


def _show_sleep(
    args: argparse.Namespace,
    path: str,
    request: RequestBody,
    is_done: Callable[[EngineState], bool],
) -> int:
    state = asyncio.run(_until_all(Client(args.url, args.api_key), path, request, is_done))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
        return 0
    columns = ("engine", "state", "level", "memory freed")
    rows = [
        (engine.rank, engine.state, engine.sleep_level or "awake", _size(engine.freed_bytes))
        for engine in state.engines
    ]
    print(f"state {state.state}, {_summary(state)}")
    print_table("", columns, rows, left=2)
    return 0


async def _until_all(
    client: Client, path: str, request: RequestBody, is_done: Callable[[EngineState], bool]
) -> ClusterState:
    """Sends the request. Returns the state once `is_done` is true for all engines that stay and the
    cluster is paused or resumed."""
    await _request(client, path, request)
    wants_pause = path == "/admin/sleep"
    deadline = time.monotonic() + _SWITCH_S
    while True:
        state = await _get_state(client)
        late = [e.rank for e in state.engines if e.state in _STAYS and not is_done(e)]
        if not late and (state.state == "paused") is wants_pause:
            return state
        if time.monotonic() > deadline:
            raise ServerError(
                f"not done after {_SWITCH_S:g} s, state {state.state}, engines {late}; the change "
                "continues: check it with swell status"
            )
        await asyncio.sleep(_POLL_S)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes else "-"


pause = partial(_switch, path="/admin/pause")
resume = partial(_switch, path="/admin/resume")
reset_prefix_cache = partial(_switch, path="/admin/reset_prefix_cache")


async def change_engines(client: Client, path: str, request: RequestBody) -> ClusterState:
    """Requests a change and prints its phases until it is complete. Returns the state. Raises
    ServerError if the change fails."""
    await _request(client, path, request)
    started, reported = time.monotonic(), ""
    while True:
        state = await _get_state(client)
        line = f"{_phase(state)}; {_summary(state)}"
        if line != reported:
            print(f"[{time.monotonic() - started:5.1f} s] {line}", flush=True)
            reported = line
        match state.rescale.phase:
            case "failed":
                reason = state.rescale.error or "the reason is unknown"
                raise ServerError(f"the change failed, {_summary(state)}: {reason}")
            case "idle":
                return state
        await asyncio.sleep(_POLL_S)


async def _get_state(client: Client) -> ClusterState:
    """Returns the state of the cluster. The server may be unreachable for a moment while the
    cluster changes."""
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
