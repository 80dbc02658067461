"""Background responses: their status, their cancellation, and what happens when an ingress, the
store or all engines are lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import openai
import pytest

from swell.cluster.api.responses import background
from swell.cluster.api.responses.background import BackgroundRunner
from swell.cluster.api.responses.response_client import ResponseStoreClient
from swell.cluster.api.store.bounded_table import table_key
from swell.cluster.api.store.response_store import (
    LEASE_S,
    MAX_LOST_RUNNERS,
    Begin,
    Heartbeat,
    Job,
    Read,
    ResponseRequest,
    ResponseStore,
    RunnerExit,
    Store,
    StoredResponse,
)
from swell.engine.wire import EngineCoreRequest
from tests.cluster.api.responses.responses_server import (
    TOKENIZER,
    ResponsesServer,
    checked,
    wait_until,
)
from tests.cluster.fake_cluster import truth, until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(background, "IDLE_HEARTBEAT_S", 0.01)


def test_a_background_response_is_queued_computed_and_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open(steps=1) as server:
            responses = server.client.responses
            begun = checked(await server.create(background=True))
            assert (begun.status, begun.background) == ("queued", True)
            assert checked(await responses.retrieve(begun.id)).status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="in_progress"):
                await server.create(previous_response_id=begun.id)
            server.engine.allow()
            done = await wait_until(
                lambda: responses.retrieve(begun.id), lambda found: found.status != "in_progress"
            )
            assert checked(done).status == "completed" and done.output_text == "the fox"
            assert (await responses.cancel(begun.id)).status == "completed"
            assert len(server.response_store.of(Begin)) == len(server.response_store.of(Store)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_cancelled_or_deleted_work_stops(tmp_path: Path, how: str) -> None:
    """Any ingress cancels the work at the store. The ingress that computes it learns this with its
    next heartbeat."""

    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open(steps=1) as server:
            responses = server.client.responses
            begun = await server.create(background=True)
            await until(lambda: server.engine.requests)
            if how == "cancel":
                assert checked(await responses.cancel(begun.id)).status == "cancelled"
            else:
                await responses.delete(begun.id)
            await until(lambda: server.engine.aborted)
            assert not server.engine.requests
            if how == "cancel":
                assert (await responses.retrieve(begun.id)).status == "cancelled"
            else:
                with pytest.raises(openai.NotFoundError):
                    await responses.retrieve(begun.id)
            assert server.response_store.of(Store) == []

    asyncio.run(scenario())


def test_a_foreground_response_cannot_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "x").open() as server:
            answer = await server.create()
            with pytest.raises(openai.BadRequestError) as caught:
                await server.client.responses.cancel(answer.id)
            assert caught.value.code == "not_in_background"

    asyncio.run(scenario())


async def pass_lease(server: ResponsesServer) -> None:
    """Passes enough time that a silent runner loses its responses while the others keep theirs."""
    for _ in range(6):
        server.response_store.now_s += LEASE_S / 5
        heartbeats = server.response_store.heartbeats
        await until(lambda heartbeats=heartbeats: server.response_store.heartbeats > heartbeats + 2)


def test_a_response_that_lost_many_ingresses_is_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "x").open(steps=0) as server:
            retrieve = server.client.responses.retrieve
            begun = await server.create(background=True)
            (begin,) = server.response_store.of(Begin)
            body = begin.kept.body.replace(begun.id.encode(), b"resp_dead")
            kept = StoredResponse(body, begin.kept.items)
            dead = Begin(table_key("", "resp_dead"), kept, "gone", begin.job, MAX_LOST_RUNNERS - 1)
            assert server.response_store.store.handle(dead, server.response_store.now_s)
            assert (await retrieve("resp_dead")).status == "in_progress"
            await pass_lease(server)
            failed = checked(await retrieve("resp_dead"))
            assert (failed.status, failed.error.code) == ("failed", "server_error")
            assert "were lost" in failed.error.message
            assert (await retrieve(begun.id)).status == "in_progress"

    asyncio.run(scenario())


def core(request: EngineCoreRequest) -> EngineCoreRequest:
    """Returns the request without its ids, which do not affect the output."""
    return msgspec.structs.replace(request, request_id="", external_req_id="")


@pytest.mark.parametrize("seed", [{}, {"seed": 7}])
def test_another_ingress_takes_over_the_responses_of_a_dead_one(
    tmp_path: Path, seed: dict[str, int]
) -> None:
    """The second ingress continues with the conversation and gives the same answer as the first
    would have."""

    async def scenario() -> None:
        async with (
            ResponsesServer(tmp_path, None).open(steps=5) as server,
            server.second_ingress() as (_, client, _),
        ):
            first = await server.create(
                input="before", max_output_tokens=5, extra_body={"ignore_eos": True}
            )
            begun = await server.create(
                background=True,
                max_output_tokens=12,
                temperature=0.8,
                previous_response_id=first.id,
                instructions="be brief",
                extra_body={"ignore_eos": True, "top_k": 5, **seed},
            )
            await until(lambda: len(server.engine.arrived) == 2)
            server.store_handle.away = True  # the first ingress has stopped
            await pass_lease(server)
            await until(lambda: len(server.engine.arrived) == 3)
            _, one, two = server.engine.arrived
            assert core(one) == core(two)
            assert two.sampler.seed == seed.get("seed", one.sampler.seed)
            assert checked(await client.responses.retrieve(begun.id)).status == "in_progress"
            server.engine.allow()
            done = await wait_until(
                lambda: client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            checked(done)
            want = truth(one.prompt_token_ids, 12, one.sampler.seed)
            assert done.output_text == TOKENIZER.decode(want, skip_special_tokens=True)
            assert (done.id, done.created_at) == (begun.id, begun.created_at)
            assert done.previous_response_id == first.id and done.instructions == "be brief"

    asyncio.run(scenario())


def test_an_ingress_without_engines_takes_over_no_response(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ResponsesServer(tmp_path, "the fox").open(steps=0) as server,
            server.second_ingress() as (_, _client, second_ingress),
        ):
            await server.create(background=True)
            second_ingress.llm._first_engine.clear()
            server.store_handle.away = True
            await pass_lease(server)
            await pass_lease(server)
            assert len(server.engine.arrived) == 1
            second_ingress.llm._first_engine.set()
            await until(lambda: len(server.engine.arrived) == 2)

    asyncio.run(scenario())


def test_a_response_is_taken_over_though_too_many_requests_wait(tmp_path: Path) -> None:
    """A takeover is not subject to admission: the stopped ingress already admitted the request."""

    async def scenario() -> None:
        full = {"scheduler.max_rows": 1, "serve.max_waiting_requests": 2}
        async with (
            ResponsesServer(tmp_path, "the fox", **full).open(steps=0) as server,
            server.second_ingress() as (_, client, _),
        ):
            begun = [await server.create(background=True) for _ in range(3)]
            begun.append(
                await client.responses.create(model="fake", input="hello", background=True)
            )
            await until(lambda: len(server.engine.arrived) == 4)
            server.store_handle.away = True
            await pass_lease(server)
            server.engine.allow()
            for one in begun:
                done = await wait_until(
                    lambda id=one.id: client.responses.retrieve(id),
                    lambda found: found.status not in ("queued", "in_progress"),
                )
                assert done.output_text == "the fox", done.error

    asyncio.run(scenario())


def test_an_ingress_that_was_suspended_changes_nothing(tmp_path: Path) -> None:
    """The ingress resumes and delivers its answer after another one has taken the response over."""

    async def scenario() -> None:
        async with (
            ResponsesServer(tmp_path, "the fox").open(steps=0) as server,
            server.second_ingress() as (_, client, _),
        ):
            begun = await server.create(background=True)
            server.store_handle.away = True
            await pass_lease(server)
            await until(lambda: len(server.engine.arrived) == 2)
            server.store_handle.away = False
            await until(lambda: server.engine.aborted)
            assert len(server.engine.requests) == 1, "one of them continues"
            server.engine.allow()
            done = await wait_until(
                lambda: client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert done.output_text == "the fox"
            kept = [
                request for request in server.store_handle.requests if isinstance(request, Store)
            ]
            assert kept == [], "the first ingress was ordered to stop"

    asyncio.run(scenario())


def test_a_terminating_ingress_hands_over_its_responses_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ResponsesServer(tmp_path, "the fox").open(steps=0) as server,
            server.second_ingress() as (_, client, second_ingress),
        ):
            begun = await client.responses.create(model="fake", input="x", background=True)
            await until(lambda: server.engine.requests)
            await second_ingress.stop()
            await until(lambda: len(server.engine.arrived) == 2)
            server.engine.allow()
            done = await wait_until(
                lambda: server.client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert done.output_text == "the fox"
            assert len(server.response_store.of(RunnerExit)) == 1

    asyncio.run(scenario())


def test_a_terminating_ingress_returns_responses_that_it_just_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ingress exits while the heartbeat reply that assigns it a response is on the way."""
    monkeypatch.setattr(background, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(background, "IDLE_HEARTBEAT_S", 0.01)
    store = ResponseStore(10, 10**6, 1000)
    store.handle(Begin("r", StoredResponse(b"{}", b"[]"), "gone", Job(b"{}")), 0.0)
    store.handle(RunnerExit("gone"), 0.0)

    async def scenario() -> None:
        given, arrives = asyncio.Event(), asyncio.Event()

        async def remote(message: object) -> object:
            reply = store.handle(message, 0.0)
            if isinstance(message, Heartbeat):
                given.set()
                await arrives.wait()
            return reply

        handle = SimpleNamespace(handle=SimpleNamespace(remote=remote))
        runner = BackgroundRunner(ResponseStoreClient(handle), lambda begin: None, lambda: True)
        runner.start()
        await given.wait()
        assert store._running["r"].begin.runner
        await runner.close()
        assert store._running["r"].begin.runner == ""

    asyncio.run(scenario())


def test_a_failed_heartbeat_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open(steps=0) as server:
            runs = server.cluster.ingress._responses._background
            call, failed = runs._store.call, []

            async def once(request: ResponseRequest) -> object:
                if isinstance(request, Heartbeat) and not failed:
                    failed.append(request)
                    raise ZeroDivisionError("injected")
                return await call(request)

            monkeypatch.setattr(runs._store, "call", once)
            begun = await server.create(background=True)
            await server.client.responses.cancel(begun.id)
            await until(lambda: server.engine.aborted)
            assert failed

    asyncio.run(scenario())


def test_a_new_store_learns_the_running_responses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open(steps=1) as server:
            responses = server.client.responses
            begun = await server.create(background=True)
            server.response_store.away = True
            server.response_store.forget()
            server.response_store.away = False
            await until(
                lambda: server.response_store.store.handle(Read(table_key("", begun.id)), 0.0)
            )
            assert (await responses.retrieve(begun.id)).status == "in_progress"
            server.response_store.away = True
            server.engine.allow()
            await until(
                lambda: any(isinstance(request, Store) for request in server.response_store.missed)
            )
            server.response_store.away = False
            done = await wait_until(
                lambda: responses.retrieve(begun.id), lambda found: found.status == "completed"
            )
            assert done.output_text == "the fox"

    asyncio.run(scenario())


def test_a_background_response_that_no_engine_computes_is_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.no_engine_timeout_s": 0.05, "cluster.start_timeout_s": 0.05}
        async with ResponsesServer(tmp_path, "the fox", **settings).open(steps=0) as server:
            begun = await server.create(background=True)
            await until(lambda: server.engine.requests)
            await server.cluster.kill(server.engine)
            failed = await wait_until(
                lambda: server.client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert checked(failed).status == "failed" and "waited" in failed.error.message

    asyncio.run(scenario())


def test_running_responses_are_not_evicted(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ResponsesServer(tmp_path, "x")
        server.response_store.limit = 1
        server.response_store.forget()
        async with server.open(steps=0):
            await server.create(background=True)
            with pytest.raises(openai.InternalServerError) as caught:
                await server.create(background=True)
            assert (caught.value.status_code, caught.value.code) == (503, "store_full")

    asyncio.run(scenario())


def test_a_response_that_the_store_cannot_hold_is_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ResponsesServer(tmp_path, "the fox " * 100)
        server.response_store.limit_bytes = 1600
        server.response_store.forget()
        async with server.open():
            begun = await server.create(background=True)
            failed = await wait_until(
                lambda: server.client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert checked(failed).status == "failed" and failed.output == []
            assert "stored_response_bytes" in failed.error.message

    asyncio.run(scenario())
