"""`python -m tests.benchmarks.bare MODEL --port P`: the ingress's own routes and one engine in one
process, under a plain uvicorn.

No Ray, no Serve, no channel: the event loop and the engine's thread exchange messages. The
additional cost of `swell serve` is the cost of the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import signal
import threading
from functools import partial
from typing import Any

import uvloop

from swell.cluster.api.ingress import build_ingress
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.client.engine_connection import EngineId, EngineListener
from swell.cluster.client.engine_core_client import MetricsExchange
from swell.cluster.control.ray.http_port import claim_port
from swell.configs.runtime.log import configure_logging
from swell.configs.runtime.process import prepare_for_torch
from swell.configs.schema import load, parse_override
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.transport.runtime import THREADS, drive
from swell.coordinator.wire import ClusterView
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import AbortRequests, EngineCoreOutputs, EngineCoreRequest

_CLIENT = b"bare"
_DRAIN_S = 5.0


class BareEngine:
    """One engine on a thread of its own, in place of an ingress's connections. `send` and `close`
    are called in the event loop, and the listener runs there."""

    def __init__(
        self,
        core: EngineCore,
        client_index: int,
        listener: EngineListener,
        metrics: MetricsExchange,
        *,
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self._core = core
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        limits = core.limits
        member = Member(
            0,
            ChannelAddress("", "", ""),
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_blocks=limits.num_blocks,
        )
        self._loop.call_soon(listener.on_view, ClusterView(Roster(1, (member,))), [])
        self._thread = threading.Thread(target=self._run, name="bare-engine")
        self._thread.start()

    def send(self, engine: EngineId, message: Any) -> None:
        self._messages.put(message)

    def close(self) -> None:
        self._closing = True
        self._messages.put(None)
        self._thread.join()
        self._core.shutdown()

    def _run(self) -> None:
        while not self._closing:
            if not self._core.has_work:
                self._take(self._messages.get())
            drive(self._intake())
            for outputs in drive(self._core.step_on(THREADS, self._intake)).values():
                message = EngineCoreOutputs(outputs)
                self._loop.call_soon_threadsafe(self._listener.on_outputs, message)

    async def _intake(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._messages.get_nowait())

    def _take(self, message: Any) -> None:
        match message:
            case EngineCoreRequest():
                refused = self._core.add_request(message, _CLIENT)
                if refused is not None:
                    answer = EngineCoreOutputs([refused])
                    self._loop.call_soon_threadsafe(self._listener.on_outputs, answer)
            case AbortRequests():
                self._core.abort_requests(message.request_ids, message.attempts)


async def serve(model: str, overrides: dict[str, Any]) -> None:
    """Serves until SIGINT or SIGTERM."""
    config = claim_port(load(model, {"parallel.executor": "inproc", **overrides}))
    executor = build_executor(config)
    core = EngineCore(config, executor, executor.start())
    ingress = await build_ingress(config, partial(BareEngine, core), manager=None)
    edge = EdgeServer(ingress.app, config.serve.host, config.serve.port, _DRAIN_S, config.serve)
    await edge.start()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    print(f"ready: http://{config.serve.host}:{edge.port}", flush=True)
    await ended.wait()
    await edge.stop()
    await ingress.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bare", description=__doc__)
    parser.add_argument("model", help="a YAML file of ours, a model folder or a hub id")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--set", action="append", default=[], type=parse_override, metavar="K=V")
    args = parser.parse_args()
    configure_logging()
    prepare_for_torch()
    uvloop.run(serve(args.model, {**dict(args.set), "serve.port": args.port}))


if __name__ == "__main__":
    main()
