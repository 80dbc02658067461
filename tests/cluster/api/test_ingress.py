"""The whole path without Ray and without a model: HTTP, ingress, channel, engines, and back.

The engines use the fake worker. Each of its tokens is a hash of the whole context, so an answer
that another engine continued wrongly cannot look right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from swell.cluster.api.ingress import build_ingress
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.configs.schema import load
from swell.coordinator.service import CoordinatorService
from swell.coordinator.transport.channel import make_keys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from swell.coordinator.transport.ports import free_port
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorLimits
from swell.engine.serving.server import EngineServer
from swell.engine.wire import EngineCoreRequest
from tests.cluster.fake_cluster import until
from tests.cluster.text import tokenizers_for_tests
from tests.engine.executor.fake_worker import FakeExecutor, next_token
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 600


QUICK_S, SLOW_S = 0.002, 0.1


class SlowExecutor(FakeExecutor):
    """An executor whose steps take some time, so that a test can act during an answer."""

    step_s = QUICK_S

    def run_until(self, step: int):
        threading.Event().wait(self.step_s)
        return super().run_until(step)


class PatientRuntime(ThreadRuntime):
    """A `ThreadRuntime` whose clock stands still until `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self._since = super().now()
        self._has_begun = False

    def begin(self) -> None:
        self._has_begun = True

    def now(self) -> float:
        return super().now() if self._has_begun else self._since


class ThreadedCluster:
    """A coordinator, engines on threads, one ingress with a real HTTP server."""

    def __init__(self, folder: Path, **serve: object) -> None:
        self.config = load(
            {
                "model": {"path": str(folder), "name": "fake"},
                "cache": {"block_tokens": 4},
                "scheduler": {"max_rows": 8, "policy": "priority"},
                "serve": serve,
                "cluster": {"heartbeat_s": 0.2},
            }
        )
        self.endpoint = CoordinatorEndpoint(
            make_keys(), secrets.token_hex(8), free_port("127.0.0.1")
        )
        self.coordinator = CoordinatorService(self.config.cluster, endpoint=self.endpoint)
        self.engines: dict[int, EngineServer] = {}
        self.threads: list[threading.Thread] = []
        self.url = ""

    def add_engine(self, rank: int, version: str = "") -> None:
        core = EngineCore(self.config, SlowExecutor(600, 4), ExecutorLimits(600, MAX_MODEL_LEN, 50))
        server = EngineServer(
            self.config,
            rank,
            core,
            self.coordinator.keys,
            self.coordinator.address,
            version=version,
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        self.engines[rank] = server
        self.threads.append(thread)
        self.coordinator.join([server.member], HANG_S)

    def remove_engine(self, rank: int) -> None:
        self.coordinator.remove_failed([rank])
        self.engines.pop(rank).stop()

    async def until_all_run(self, requests: int) -> None:
        """Waits until the engines hold exactly `requests` requests and each has output tokens."""

        def all_run() -> bool:
            engines = list(self.engines.values())
            held = [r for e in engines for r in list(e.core.scheduler.requests.values())]
            return len(held) == requests and all(r.num_outputs > 0 for r in held)

        await until(all_run)

    def replace_coordinator(self) -> None:
        """Starts a successor with the same address and empty state. Its clock stands still until
        all engines have reported to it."""
        self.coordinator.stop()
        runtime = PatientRuntime()
        self.coordinator = CoordinatorService(
            self.config.cluster, runtime, endpoint=self.endpoint, recover=True
        )
        while len(self.coordinator._hellos) < len(self.engines):
            time.sleep(0.01)
        runtime.begin()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        manager = SimpleNamespace()
        connect = partial(AsyncEngineCoreClient, self.coordinator.address, self.coordinator.keys)
        ingress = await build_ingress(self.config, connect, manager)
        edge = EdgeServer(ingress.app, "127.0.0.1", 0, 5, self.config.serve)
        await edge.start()
        try:
            url = f"http://127.0.0.1:{edge.port}"
            async with httpx.AsyncClient(base_url=url, timeout=None) as client:  # pytest times out
                while not ingress.llm.active_ranks:
                    await asyncio.sleep(0.01)
                yield client
        finally:
            await edge.stop()
            await ingress.stop()

    def close(self) -> None:
        for server in self.engines.values():
            server.stop()
        for thread in self.threads:
            thread.join()
        self.coordinator.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@contextlib.contextmanager
def threaded_cluster(folder: Path, engines: int, **serve: object):
    house = ThreadedCluster(folder, **serve)
    try:
        for rank in range(engines):
            house.add_engine(rank)
        yield house
    finally:
        house.close()


def truth(prompt: list[int], count: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def body(prompt: list[int], count: int, **extra: object) -> dict:
    payload = {"model": "fake", "prompt": prompt, "max_tokens": count, "seed": 3}
    return {**payload, "ignore_eos": True, "return_token_ids": True, **extra}


async def read_stream(client: httpx.AsyncClient, payload: dict) -> list[int]:
    ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**payload, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
    return ids


def test_answers_continue_when_their_engine_leaves(folder, monkeypatch):
    prompts = [[n, 2, 3, n] for n in range(6)]

    async def scenario(house: ThreadedCluster) -> tuple[list[list[int]], list[httpx.Response]]:
        async with house.serving() as client:
            streams = [asyncio.create_task(read_stream(client, body(p, 300))) for p in prompts]
            wholes = [
                asyncio.create_task(client.post("/v1/completions", json=body(p, 300)))
                for p in prompts
            ]
            await house.until_all_run(12)
            house.add_engine(2)
            await asyncio.to_thread(house.remove_engine, 0)
            await house.until_all_run(12)
            await asyncio.to_thread(house.remove_engine, 1)
            monkeypatch.setattr(SlowExecutor, "step_s", QUICK_S)
            return await asyncio.gather(*streams), await asyncio.gather(*wholes)

    monkeypatch.setattr(SlowExecutor, "step_s", SLOW_S)
    with threaded_cluster(folder, 2) as house:
        streams, wholes = asyncio.run(scenario(house))
    expected = [truth(prompt, 300, seed=3) for prompt in prompts]
    assert streams == expected
    assert [w.json()["choices"][0]["token_ids"] for w in wholes] == expected
    assert [w.json()["usage"]["completion_tokens"] for w in wholes] == [300] * 6
    moved = [w.headers["x-swell-engine"].split(",") for w in wholes]
    assert all(ranks[-1] == "2" and len(ranks) >= 2 for ranks in moved)


def test_answers_wait_for_an_engine_when_the_last_one_leaves(folder):
    async def scenario(house: ThreadedCluster) -> list[list[int]]:
        async with house.serving() as client:
            early = asyncio.create_task(read_stream(client, body([1, 2], 200)))
            await house.until_all_run(1)
            await asyncio.to_thread(house.remove_engine, 0)
            await asyncio.sleep(0.1)
            late = asyncio.create_task(read_stream(client, body([1], 5)))
            await asyncio.sleep(0.1)
            assert not late.done()
            house.add_engine(1)
            return await asyncio.gather(early, late)

    with threaded_cluster(folder, 1) as house:
        early, late = asyncio.run(scenario(house))
    assert early == truth([1, 2], 200, seed=3)
    assert late == truth([1], 5, seed=3)


def test_a_restarted_coordinator_rebuilds_its_state_from_all_others(folder):
    async def scenario(house: ThreadedCluster) -> tuple[list[list[int]], list[int]]:
        async with house.serving() as client:
            before = house.coordinator.view().roster
            streams = [asyncio.create_task(read_stream(client, body([n], 300))) for n in range(4)]
            await asyncio.to_thread(house.replace_coordinator)
            after = (await asyncio.to_thread(house.coordinator.view)).roster
            assert after.epoch > before.epoch and after.members == before.members
            await asyncio.to_thread(house.add_engine, 2)
            await asyncio.to_thread(house.remove_engine, 0)
            while 2 not in (await client.get("/ready")).json().get("engines", []):
                await asyncio.sleep(0.01)
            whole = await client.post("/v1/completions", json=body([9], 20, data_parallel_rank=2))
            return await asyncio.gather(*streams), whole.json()["choices"][0]["token_ids"]

    with threaded_cluster(folder, 2) as house:
        streams, late = asyncio.run(scenario(house))
    assert streams == [truth([n], 300, seed=3) for n in range(4)]
    assert late == truth([9], 20, seed=3)


def test_two_ingresses_share_the_engines_without_mixing_answers(folder):
    prompts = [[n] for n in range(8)]

    async def scenario(house: ThreadedCluster) -> list[list[int]]:
        async with house.serving() as one, house.serving() as two:
            return await asyncio.gather(
                *(read_stream((one, two)[n % 2], body(p, 60)) for n, p in enumerate(prompts))
            )

    with threaded_cluster(folder, 2) as house:
        assert asyncio.run(scenario(house)) == [truth(p, 60, seed=3) for p in prompts]


def test_any_ingress_reports_the_counts_of_all_ingresses(folder):
    """The counts include ingresses that have stopped, and ingresses that report again to a
    restarted coordinator."""

    async def ended(client: httpx.AsyncClient) -> float:
        text = (await client.get("/metrics")).text
        line = r'^swell_request_success_total{finished_reason="length"} (\S+)$'
        (count,) = re.findall(line, text, re.MULTILINE)
        return float(count)

    async def all_report(count: int, *clients: httpx.AsyncClient) -> None:
        async with asyncio.timeout(HANG_S):
            while {await ended(client) for client in clients} != {count}:
                await asyncio.sleep(0.02)

    async def scenario(house: ThreadedCluster) -> float:
        async with house.serving() as one:
            async with house.serving() as two:
                for client in (one, two, two):
                    await read_stream(client, body([1], 3))
                await all_report(3, one, two)
                await asyncio.to_thread(house.replace_coordinator)
                await read_stream(one, body([2], 3))
                await all_report(4, one, two)
            async with house.serving() as three:
                return await ended(three)

    with threaded_cluster(folder, 1) as house:
        assert asyncio.run(scenario(house)) == 4


def test_everything_is_freed_after_clients_disconnected(folder):
    async def leave(house: ThreadedCluster, client: httpx.AsyncClient, stream: bool) -> None:
        """Disconnects while an engine computes the answer."""
        asked = asyncio.create_task(
            client.post("/v1/completions", json=body([5], 500, stream=stream))
        )
        while not any(engine.core.scheduler.requests for engine in house.engines.values()):
            assert not asked.done()
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    async def scenario(house: ThreadedCluster) -> dict:
        async with house.serving() as client:
            for stream in (True, False):
                await leave(house, client, stream)
                async with asyncio.timeout(HANG_S):
                    while True:
                        report = (await client.get("/admin/idle")).json()
                        if all(engine["idle"] for engine in report["engines"]):
                            break
                        await asyncio.sleep(0.02)
                for engine in house.engines.values():
                    assert not engine.core.scheduler.requests, "it goes on without a reader"
            return report

    with threaded_cluster(folder, 2) as house:
        report = asyncio.run(scenario(house))
    assert report["engines"] == [
        {"rank": 0, "idle": True, "reason": None},
        {"rank": 1, "idle": True, "reason": None},
    ]


def test_requests_need_a_valid_key(folder, tmp_path):
    (tmp_path / "users").write_text("# keys\nalpha  # of somebody\nbeta\n")
    (tmp_path / "admins").write_text("root\n")

    async def scenario(house: ThreadedCluster) -> list[int]:
        async with house.serving() as client:
            statuses = []
            for key in (None, "alpha", "beta", "gamma", "root"):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                post = await client.post("/v1/completions", json=body([1], 2), headers=headers)
                admin = await client.get("/admin/idle", headers=headers)
                statuses.append((post.status_code, admin.status_code))
            assert (await client.get("/health")).status_code == 200
            return statuses

    files = {
        "api_keys_file": str(tmp_path / "users"),
        "admin_keys_file": str(tmp_path / "admins"),
    }
    with threaded_cluster(folder, 1, **files) as house:
        statuses = asyncio.run(scenario(house))
    assert statuses == [(401, 401), (200, 401), (200, 401), (401, 401), (401, 200)]


def test_headers_of_a_request_reach_its_engine(folder):
    sent = {"x-request-id": "mine", "traceparent": "00-ab-cd-01", "tracestate": "k=v"}
    payload = body([1, 2], 400, stream=True, priority=7, cache_salt="salt", n=2)

    async def scenario(house: ThreadedCluster) -> list[EngineCoreRequest]:
        async with house.serving() as client:
            stream = client.stream("POST", "/v1/completions", json=payload, headers=sent)
            async with stream as answer:
                assert answer.headers["x-request-id"] == "mine"
                requests = house.engines[0].core.scheduler.requests
                async for _ in answer.aiter_lines():
                    if len(requests) == 2:  # the second may come after the first one's first token
                        break
                return [r.core for r in list(requests.values())]

    with threaded_cluster(folder, 1) as house:
        requested = asyncio.run(scenario(house))
    assert sorted(core.sampler.seed for core in requested) == [3, 4]
    for core in requested:
        assert core.external_req_id == "mine"
        assert core.trace_headers == {"traceparent": "00-ab-cd-01", "tracestate": "k=v"}
        assert (core.priority, core.cache_salt) == (7, "salt")
