"""A client that has stopped sending still gets its answer. A client that has disconnected is
detected."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swell.cluster.api.server import half_close
from tests.cluster.fake_cluster import (
    UNLIMITED_STEPS,
    FakeCluster,
    FakeEngine,
    body,
    truth,
    until,
)
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
LONG = 500
"""A token count larger than the engine can sample during the test."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on each kind of loop and transport. Serve's replicas use uvloop."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(work)

    return run


def post(payload: dict[str, Any], version: str = "1.1", **headers: str) -> bytes:
    data = json.dumps(payload).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "Host: localhost"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Peer:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes, *, stops: bool = True) -> None:
        self.writer.write(data)
        await self.writer.drain()
        if stops:
            self.writer.write_eof()

    async def rest(self) -> bytes:
        """Returns all bytes until the server closes."""
        async with asyncio.timeout(HANG_S):
            return await self.reader.read()

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self.reader.readuntil(end)

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(folder: Path, steps: int) -> AsyncIterator[tuple[FakeCluster, FakeEngine, Any]]:
    async with FakeCluster(folder).serving() as cluster:
        engine = await cluster.join(0, steps)
        peers: list[Peer] = []

        async def connect() -> Peer:
            peers.append(Peer(*await asyncio.open_connection("127.0.0.1", cluster.edge.port)))
            return peers[-1]

        try:
            yield cluster, engine, connect
        finally:
            for peer in peers:
                peer.writer.close()


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def parsed(data: bytes) -> tuple[int, bytes]:
    """Returns status and body as Python's own client parses them, which skips interim responses."""
    answer = http.client.HTTPResponse(_Socket(data))  # type: ignore[arg-type]
    answer.begin()
    return answer.status, answer.read()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_closed_its_sending_side_gets_its_answer(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch, version: str, stream: bool
) -> None:
    """The answer comes some time after the client stopped sending, and before any probe."""
    monkeypatch.setattr(half_close, "PROBE_S", 600.0)
    payload = body([5, 6], 8, stream=stream)

    async def scenario() -> bytes:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(payload, version))
            await until(lambda: engine.requests)
            await asyncio.sleep(
                0.1
            )  # a half close mistaken for a disconnect would be handled by now
            engine.allow()
            data: bytes = await peer.rest()
            assert engine.aborted == []
            return data

    data = run(scenario())
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    status, text = parsed(data)
    assert status == 200
    if stream:
        assert text.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
        ids = [id for event in events for one in event["choices"] for id in one["token_ids"]]
    else:
        ids = json.loads(text)["choices"][0]["token_ids"]
    assert ids == truth([5, 6], 8)


def test_short_routes_answer_a_half_closed_client(folder: Path, run: Any) -> None:
    async def scenario() -> bytes:
        async with connected(folder, 0) as (_, _, connect):
            peer = await connect()
            await peer.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return await peer.rest()  # type: ignore[no-any-return]

    status, text = parsed(run(scenario()))
    assert (status, json.loads(text)["data"][0]["id"]) == (200, "fake")


def test_all_complete_requests_on_the_connection_are_answered(folder: Path, run: Any) -> None:
    payload = body([5, 6], 4)

    async def scenario() -> tuple[bytes, int]:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(payload) * 2 + post(payload)[:-3])
            await until(lambda: engine.requests)
            engine.allow()
            data = await peer.rest()
            return data, len(engine.arrived)

    data, arrived = run(scenario())
    assert data.count(b"HTTP/1.1 200 OK\r\n") == arrived == 2
    assert data.count(b'"finish_reason":"length"') == 2


def test_a_client_that_waits_long_is_probed(folder: Path, run: Any) -> None:
    """The probe is an interim response, which clients skip."""
    payload = body([5, 6], 4)

    async def scenario() -> bytes:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(payload))
            interim = await peer.until(b"\r\n\r\n")
            assert engine.aborted == []
            engine.allow()
            return interim + await peer.rest()

    data = run(scenario())
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    status, text = parsed(data)
    assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, truth([5, 6], 4))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_disconnect_is_detected_before_there_is_an_answer(
    folder: Path, run: Any, stream: bool
) -> None:
    async def scenario() -> None:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], LONG, stream=stream)), stops=False)
            await until(lambda: engine.requests)
            await peer.leave()
            await until(lambda: engine.aborted)
            await until(lambda: not engine.requests)

    run(scenario())


def test_a_disconnect_in_a_stream_is_detected_by_writes(folder: Path, run: Any) -> None:
    async def scenario() -> None:
        async with connected(folder, 2) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], LONG, stream=True)))
            await peer.until(b"data: ")
            await peer.leave()
            engine.allow(2)
            await until(lambda: engine.aborted)
            assert len(engine.arrived) == 1

    run(scenario())


def test_a_disconnect_in_a_stalled_stream_is_detected(folder: Path, run: Any) -> None:
    """The server sends a comment while no token is ready, because only a write detects the
    disconnect. A client that is still there skips the comment."""

    async def scenario() -> bytes:
        async with connected(folder, 0) as (_, engine, connect):
            gone, stays = await connect(), await connect()
            await gone.send(post(body([5, 6], LONG, stream=True)), stops=False)
            await stays.send(post(body([5, 6], 2, stream=True)), stops=False)
            await until(lambda: len(engine.requests) == 2)
            engine.allow(1)  # one step: both answers begin
            for peer in (gone, stays):
                await peer.until(b"data: ")
                peer.writer.write_eof()
            await gone.leave()
            await stays.until(b"\n:\n\n")
            await until(lambda: engine.aborted)
            engine.allow()
            return await stays.rest()  # type: ignore[no-any-return]

    assert run(scenario()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_disconnect_aborts_all_requests_of_the_connection(folder: Path, run: Any) -> None:
    """The disconnect aborts the request that is being answered and those that wait for it."""

    async def scenario() -> None:
        async with connected(folder, 0) as (cluster, engine, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], 2)) + post(body([5, 6], LONG)) * 2, stops=False)
            engine.allow(2)
            await peer.until(b'"usage"')
            await until(lambda: len(engine.arrived) == 2)
            await peer.leave()
            await until(lambda: engine.aborted)
            await until(lambda: not cluster.edge._server.server_state.tasks)

    run(scenario())


def test_a_disconnect_of_an_http10_client_is_detected(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP/1.0 lacks interim responses, so the kernel probes the client."""
    monkeypatch.setattr(half_close, "KEEPALIVE_S", 1)

    async def scenario() -> None:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            # The client's kernel drops the connection after one second instead of one minute.
            found = peer.writer.get_extra_info("socket")
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
            await peer.send(post(body([5, 6], LONG), "1.0"), stops=False)
            await until(lambda: engine.requests)
            await peer.leave()
            await until(lambda: engine.aborted)

    run(scenario())


@pytest.mark.parametrize("cut", [-1, 40], ids=["in the body", "in the head"])
def test_a_request_that_is_cut_off_reaches_no_engine(folder: Path, run: Any, cut: int) -> None:
    async def scenario() -> None:
        async with connected(folder, 0) as (cluster, engine, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], 4))[:cut])
            await peer.rest()
            assert (await cluster.client.get("/health")).status_code == 200
            assert engine.arrived == []

    run(scenario())


@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_to_an_http10_client_has_no_chunks(
    folder: Path, run: Any, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the connection ends the stream, also for a client that has stopped sending."""
    monkeypatch.setattr(half_close, "PROBE_S", 0.3)

    async def scenario() -> bytes:
        async with connected(folder, 2) as (_, engine, connect):
            peer = await connect()
            expecting = post(body([5, 6], 4, stream=True), "1.0", Expect="100-continue")
            await peer.send(expecting, stops=stops)
            start = await peer.until(b"data: ")
            if stops:
                start += await peer.until(b":\n\n")
            engine.allow()
            data: bytes = start + await peer.rest()
            return data

    head, _, text = run(scenario()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding" not in head
    lines = {line.partition(b":")[0] for line in text.split(b"\n")}
    assert lines == {b"data", b""}
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_stream_to_an_http10_client_is_probed_once_it_has_begun(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written to the client before the first token, which may come late."""
    monkeypatch.setattr(half_close, "PROBE_S", 0.1)

    async def scenario() -> None:
        async with connected(folder, 0) as (_, engine, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], LONG, stream=True), "1.0"))
            await until(lambda: engine.requests)
            await asyncio.sleep(0.3)
            engine.allow(1)
            await peer.until(b"data: ")
            await peer.leave()
            await until(lambda: engine.aborted)

    run(scenario())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_only_http11_clients_get_100_continue(folder: Path, run: Any, version: str) -> None:
    """HTTP/1.0 does not define `Expect: 100-continue` (RFC 9110, 10.1.1)."""

    async def scenario() -> bytes:
        async with connected(folder, UNLIMITED_STEPS) as (_, _, connect):
            peer = await connect()
            await peer.send(post(body([5, 6], 2), version, Expect="100-continue"))
            data: bytes = await peer.rest()
            return data

    data = run(scenario())
    assert data.startswith(b"HTTP/1.1 100 ") == (version == "1.1")
    assert parsed(data)[0] == 200
