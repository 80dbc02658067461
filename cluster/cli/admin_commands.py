"""`swell status`, `scale`, `drain`, `pause` and `resume`: the admin API from a shell."""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial

import msgspec

from swell.cluster.api.admin.protocol import Accepted, ClusterState, DrainRequest, ScaleRequest
from swell.cluster.cli.console import print_table
from swell.cluster.cli.http_client import Client, ServerError
from swell.cluster.text.schema.request_body import RequestBody

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
    print(_phase(state))
    columns = ("engine", "state", "node", "pid", "running", "waiting", "KV cache", "steps")
    rows = [
        (
            engine.rank,
            engine.state,
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


def scale(args: argparse.Namespace) -> int:
    request = ScaleRequest(engines=args.engines, drain_timeout_s=args.drain_timeout)
    return _change(args, "/admin/scale", request)


def drain(args: argparse.Namespace) -> int:
    return _change(args, "/admin/drain", DrainRequest(rank=args.rank))


def _change(args: argparse.Namespace, path: str, request: RequestBody) -> int:
    request.check()
    asyncio.run(change_engines(Client(args.url, args.api_key), path, request))
    return 0


def _switch(args: argparse.Namespace, path: str) -> int:
    """Request it and show the state after it."""
    asyncio.run(Client(args.url, args.api_key).post(path, RequestBody(), Accepted))
    return status(args)


pause = partial(_switch, path="/admin/pause")
resume = partial(_switch, path="/admin/resume")


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
    error = f" ({state.rescale.error})" if state.rescale.error else ""
    return f"change of engines: {state.rescale.phase}{error}"


def _summary(state: ClusterState) -> str:
    active = sum(engine.state == "active" for engine in state.engines)
    return f"epoch {state.epoch}, {active} of {state.target} engines active"
