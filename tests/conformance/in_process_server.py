"""The whole path in this process, without Ray, with the model nano: coordinator, engine, ingress,
HTTP. A defect that a test finds here also exists in a real server."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import requests

from swell.cluster.api.admin.protocol import (
    ChangeResult,
    ClusterState,
    CoordinatorState,
    EngineState,
    RescaleState,
)
from swell.cluster.api.ingress import build_ingress
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.local_cluster import LocalCluster
from swell.configs.schema import Config, load
from swell.engine.executor import Executor
from tests.cluster.store_handle import StoreOfTest
from tests.e2e.cluster import NANO
from tests.support.deadlines import HANG_S

MODEL = "nano"
MAX_BODY_BYTES = 100_000
SETTINGS = {
    "model.dtype": "float32",
    "model.max_model_len": 512,
    "parallel.executor": "inproc",
    "scheduler.policy": "priority",
    "cluster.heartbeat_s": 0.2,
    "serve.max_body_bytes": MAX_BODY_BYTES,
    "serve.request_chat_template": True,
}


class Manager:
    """Accepts every change without making it."""

    def __getattr__(self, name: str) -> Any:
        answer = {
            "not_ready_reason": lambda: ("engine 0: starts", False),
            "describe": self._describe,
        }.get(name, lambda *_: ChangeResult(1))

        async def remote(*args: Any) -> Any:
            return answer(*args)

        return SimpleNamespace(remote=remote)

    def _describe(self) -> ClusterState:
        return ClusterState(
            epoch=1,
            wave=0,
            state="serving",
            target=1,
            engines=[EngineState(rank=0, state="active")],
            coordinator=CoordinatorState(),
            rescale=RescaleState(phase="idle"),
        )


class InProcessServer:
    """A server that listens on `url`."""

    def __init__(self, url: str, executor: Executor) -> None:
        """`executor`: that of its engine."""
        self.url = url
        self.executor = executor
        self.client = httpx.Client(base_url=url, timeout=HANG_S)
        self.session = requests.Session()
        """A client for tests that send requests of their own."""

    def answers(self) -> None:
        """Raises AssertionError unless a plain request gets the right answer."""
        response = self.client.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "upper: abc"}],
                "max_tokens": 8,
                "temperature": 0,
            },
        )
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "ABC"

    def wait_idle(self) -> None:
        """Returns once every block and slot is free. Raises AssertionError if this takes too
        long."""
        end = time.monotonic() + HANG_S
        while True:
            engines = self.client.get("/admin/idle").json()["engines"]
            if all(engine["idle"] for engine in engines):
                return
            assert time.monotonic() < end, engines
            time.sleep(0.02)

    def close(self) -> None:
        self.client.close()
        self.session.close()


@contextlib.contextmanager
def start_in_process_server(model: Path = NANO, **settings: Any) -> Iterator[InProcessServer]:
    config = load(str(model), SETTINGS | settings)
    cluster = LocalCluster(config)
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    serving = threading.Thread(
        target=lambda: asyncio.run(_serve(config, cluster, ready)), daemon=True
    )
    serving.start()
    port, stop = ready.get(timeout=HANG_S)
    in_process_server = InProcessServer(f"http://127.0.0.1:{port}", cluster.executor)
    try:
        yield in_process_server
    finally:
        in_process_server.close()
        stop()
        serving.join()
        cluster.close()


async def _serve(config: Config, cluster: LocalCluster, ready: queue.SimpleQueue[Any]) -> None:
    """Serves, and reports the port and a function that stops the server from any thread."""
    ingress = await build_ingress(config, cluster.connect, Manager(), StoreOfTest().new_handle())
    edge = EdgeServer(ingress.app, "127.0.0.1", 0, 5, config.serve)
    await edge.start()
    while not ingress.llm.active_ranks:
        await asyncio.sleep(0.01)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    ready.put((edge.port, lambda: loop.call_soon_threadsafe(ending.set)))
    await ending.wait()
    await edge.stop()
    await ingress.stop()
