"""Limits of a connection: clients that send too much, too slowly, or too many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from swell.cluster.api.server.connection import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    limited_protocol,
)
from swell.cluster.api.server.http_server import EdgeServer, capped_by_fd_limit, fd_warning
from swell.configs.schema import ConfigError, ServeConfig

pytestmark = pytest.mark.slow

MIB = 1 << 20
QUICK = ServeConfig(max_connections=8, head_timeout_s=0.3, transfer_timeout_s=0.3)
PATIENT = ServeConfig(max_connections=8, head_timeout_s=30, transfer_timeout_s=30)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


async def _root(request: Request) -> JSONResponse:
    return JSONResponse("ok")


async def _echo(request: Request) -> JSONResponse:
    return JSONResponse(len(await request.body()))


async def _refused(request: Request) -> JSONResponse:
    """Answers without reading the body."""
    return JSONResponse("who are you?", 401)


async def _slow(request: Request) -> JSONResponse:
    await request.body()
    await asyncio.sleep(1.0)
    return JSONResponse("done")


APP = Starlette(
    routes=[
        Route("/", _root),
        Route("/echo", _echo, methods=["POST"]),
        Route("/refused", _refused, methods=["POST"]),
        Route("/slow", _slow, methods=["POST"]),
    ]
)


class Wire:
    """A client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Sends the data. If the server closes meanwhile, its answer can still be read."""
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), 1 << 16):
                self._writer.write(data[start : start + (1 << 16)])
                await self._writer.drain()

    async def answer(self) -> tuple[int, Any]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        body = await self._reader.readexactly(length)
        return int(head.split(b" ")[1]), json.loads(body)

    async def is_closed(self) -> bool:
        """Returns whether the server closes the connection before the test's deadline."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass
        return True


class Server:
    def __init__(self, edge: EdgeServer) -> None:
        self.edge = edge
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.edge.port)
        self._writers.append(writer)
        return Wire(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def served(limits: ServeConfig) -> AsyncIterator[Server]:
    edge = EdgeServer(APP, "127.0.0.1", 0, 1, limits)
    await edge.start()
    server = Server(edge)
    try:
        async with asyncio.timeout(60):
            yield server
    finally:
        server.close()
        await edge.stop()


HEADS = {
    "a long header": (GET + b"x: " + b"a" * (4 * MIB), 431),
    "many headers": (GET + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    "many small headers without end": (GET + b"a:\r\n" * MIB, 431),
    "a long URL": (b"GET /" + b"a" * (MAX_URL_BYTES + 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a URL without end": (b"GET /" + b"a" * (4 * MIB), 414),
    "a long trailer": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: " + b"a" * (4 * MIB),
        431,
    ),
    "a long chunk extension": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * (4 * MIB),
        431,
    ),
    "tiny chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300_000, 400),
}


@pytest.mark.parametrize("name", HEADS)
def test_an_oversized_head_is_refused_while_it_arrives(name: str) -> None:
    data, status = HEADS[name]

    async def scenario() -> None:
        async with served(PATIENT) as server:
            wire = await server.connect()
            sending = asyncio.create_task(wire.send(data))
            answered, body = await wire.answer()
            assert answered == status and body["error"]["message"]
            assert await wire.is_closed()
            await sending
            other = await server.connect()
            await other.send(GET + b"\r\n")
            assert await other.answer() == (200, "ok")

    asyncio.run(scenario())


def test_heads_below_the_limits_pass() -> None:
    async def scenario() -> None:
        async with served(PATIENT) as server:
            wire = await server.connect()
            await wire.send(b"GET /?" + b"a" * (MAX_URL_BYTES - 10) + b" HTTP/1.1\r\nHost: x\r\n")
            await wire.send(b"x: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n" + b"a: b\r\n" * 200)
            await wire.send(b"\r\n")
            assert await wire.answer() == (200, "ok")
            await wire.send(POST + b"Content-Length: %d\r\n\r\n" % MIB + b"a" * MIB)
            assert await wire.answer() == (200, MIB)
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b"a" * 500] * 2000)
            await wire.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            assert await wire.answer() == (200, 1_000_000)

    asyncio.run(scenario())


HALVES = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "half a head": GET,
    "half a body": POST + b"Content-Length: 100\r\n\r\n" + b"a" * 50,
    "half a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nff\r\naaa",
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_request_is_closed_at_its_deadline(name: str) -> None:
    async def scenario() -> None:
        async with served(QUICK) as server:
            wire = await server.connect()
            await wire.send(HALVES[name])
            status, body = await wire.answer()
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert await wire.is_closed()

    asyncio.run(scenario())


def test_a_body_that_arrives_byte_by_byte_is_closed_at_its_deadline() -> None:
    async def scenario() -> None:
        async with served(QUICK) as server:
            wire = await server.connect()
            await wire.send(POST + b"Content-Length: 100000\r\n\r\n")

            async def drip() -> None:
                while True:
                    await wire.send(b"a")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            status, _ = await wire.answer()
            dripping.cancel()
            assert status == 408

    asyncio.run(scenario())


def test_a_slow_answer_is_not_cut_off() -> None:
    """Blank lines after the request, or the first bytes of the next one, do not end a slow
    answer."""

    async def scenario(behind: bytes) -> None:
        async with served(QUICK) as server:
            wire = await server.connect()
            head = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
            await wire.send(head + behind)
            assert await wire.answer() == (200, "done")

    asyncio.run(scenario(b""))
    asyncio.run(scenario(b"\r\n\r\n"))


def test_the_head_timeout_applies_only_within_a_request() -> None:
    async def scenario() -> None:
        async with served(QUICK) as server:
            wire = await server.connect()
            await wire.send(GET + b"\r\n")
            assert await wire.answer() == (200, "ok")
            await asyncio.sleep(3 * QUICK.head_timeout_s)
            await wire.send(GET + b"\r\n")
            assert await wire.answer() == (200, "ok")
            await wire.send(GET)
            assert (await wire.answer())[0] == 408

    asyncio.run(scenario())


def test_connections_beyond_the_limit_are_refused_until_others_close() -> None:
    async def scenario() -> None:
        async with served(PATIENT) as server:
            held = [await server.connect() for _ in range(PATIENT.max_connections)]
            for wire in held:
                await wire.send(GET + b"\r\n")
                assert await wire.answer() == (200, "ok")
            late = [await server.connect() for _ in range(20)]
            for wire in late:
                status, body = await wire.answer()
                assert (status, body["error"]["code"]) == (503, "too_many_connections")
                assert "serve.max_connections=8" in body["error"]["message"]
            held[0]._writer.close()
            await held[0]._writer.wait_closed()
            while True:
                wire = await server.connect()
                await wire.send(GET + b"\r\n")
                status, _ = await wire.answer()
                if status == 200:
                    break

    asyncio.run(scenario())


def test_a_client_refused_before_its_body_reads_the_error_while_it_sends() -> None:
    async def scenario() -> None:
        async with served(PATIENT) as server:
            wire = await server.connect()
            head = b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            sending = asyncio.create_task(wire.send(head % (64 * MIB) + b"a" * (8 * MIB)))
            assert await wire.answer() == (401, "who are you?")
            assert await wire.is_closed(), "the rest of the body is no next request"
            await sending

    asyncio.run(scenario())


def test_a_flood_of_pipelined_requests_is_not_parsed_to_the_end() -> None:
    async def scenario() -> None:
        async with served(PATIENT) as server:
            wire = await server.connect()
            await wire.send((GET + b"\r\n") * 10)
            for _ in range(10):
                assert await wire.answer() == (200, "ok")
            await wire.send((GET + b"\r\n") * 100_000)
            assert await wire.is_closed()

    asyncio.run(scenario())


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
BODIES = {
    "short": (b"Content-Length: 5\r\n\r\n", b"hello", 5),
    "long": (b"Content-Length: 90000\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n" * 5000, 90_000),
    "chunked": (b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", 5),
    "empty": (b"Content-Length: 0\r\n\r\n", b"", 0),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("apart", [False, True])
def test_an_offered_protocol_upgrade_is_ignored(name: str, apart: bool) -> None:
    """Java's client offers an upgrade like this. The body is never parsed as the next request."""
    framing, body, size = BODIES[name]

    async def scenario() -> None:
        async with served(PATIENT) as server:
            wire = await server.connect()
            for _ in range(2):
                await wire.send(POST + UPGRADE + framing + (b"" if apart else body))
                if apart:
                    await asyncio.sleep(0.05)
                    await wire.send(body)
                assert await wire.answer() == (200, size)
            await wire.send(GET + UPGRADE + b"\r\n" + GET + b"\r\n")
            assert [await wire.answer(), await wire.answer()] == [(200, "ok")] * 2

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async def scenario() -> None:
        async with served(QUICK) as server:
            gone = asyncio.Event()

            async def endless(scope: Any, receive: Any, send: Any) -> None:
                start = {"type": "http.response.start", "status": 200, "headers": []}
                await send(start)
                while (await _soon(receive()))["type"] != "http.disconnect":
                    part = {"type": "http.response.body", "body": b"a" * MIB, "more_body": True}
                    await send(part)
                gone.set()

            async def _soon(message: Any) -> Any:
                try:
                    return await asyncio.wait_for(message, 0.001)
                except TimeoutError:
                    return {"type": "none"}

            server.edge._server.config.loaded_app = endless
            wire = await server.connect()
            await wire.send(GET + b"\r\n")
            await gone.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize("left_bytes", [20_000, 20_000_000])
def test_a_client_that_does_not_read_the_end_of_its_answer_is_disconnected(left_bytes: int) -> None:
    """`left_bytes` is what remains in the server's buffer when the kernel accepts no more."""

    async def scenario() -> None:
        async with served(ServeConfig(max_connections=8, transfer_timeout_s=2.0)) as server:

            async def sized(scope: Any, receive: Any, send: Any) -> None:
                size = int(scope["path"][1:])
                headers = [(b"content-length", b"%d" % size)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"a" * size})

            server.edge._server.config.loaded_app = sized
            connections = server.edge._server.server_state.connections

            async def request(size: int) -> Any:
                """Returns the server's connection after the kernel accepts no more data."""
                client, before = socket.socket(), set(connections)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                clients.append(client)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, ("127.0.0.1", server.edge.port))
                head = b"GET /%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % size
                await loop.sock_sendall(client, head)
                await asyncio.sleep(0.2)
                (connection,) = connections - before
                return connection

            clients: list[socket.socket] = []
            most = 20_000_000
            taken = most - (await request(most)).transport.get_write_buffer_size()
            connection = await request(taken + left_bytes)
            assert connection.transport.get_write_buffer_size() > 0
            async with asyncio.timeout(60):
                while connection in connections:
                    await asyncio.sleep(0.01)
            for client in clients:
                client.close()

    asyncio.run(scenario())


def test_a_disconnect_after_a_second_request_is_detected() -> None:
    async def scenario() -> None:
        async with served(PATIENT) as server:
            begun, ended = asyncio.Event(), asyncio.Event()

            async def endless(scope: Any, receive: Any, send: Any) -> None:
                begun.set()
                while (await receive())["type"] != "http.disconnect":
                    pass
                ended.set()

            server.edge._server.config.loaded_app = endless
            wire = await server.connect()
            await wire.send(GET + b"\r\n")
            await begun.wait()
            await wire.send(GET + b"\r\n")
            await asyncio.sleep(0.1)
            server.close()
            async with asyncio.timeout(60):
                await ended.wait()

    asyncio.run(scenario())


def test_connections_are_limited_by_file_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ServeConfig(max_connections=hard * 2, head_timeout_s=1, transfer_timeout_s=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limits = capped_by_fd_limit(wanted)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert 0 < limits.max_connections < soft == hard
        assert capped_by_fd_limit(QUICK) == QUICK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replaces `ulimit -n` for this process's calls: a process cannot raise its real limit
    again."""

    def set_limit(limit: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    return set_limit


def test_too_few_file_descriptors_are_refused_at_the_start(few_files: Any) -> None:
    few_files(256)
    for check in (capped_by_fd_limit, fd_warning):
        with pytest.raises(ConfigError, match=r"open files of this process is 256 .*ulimit"):
            check(ServeConfig())


def test_a_reduced_connection_limit_is_logged_at_the_start_and_named_to_clients(
    few_files: Any,
) -> None:
    few_files(1024)
    warning = fd_warning(ServeConfig())
    assert warning is not None
    assert "allows 512 connections instead of serve.max_connections=16384" in warning
    limits = capped_by_fd_limit(ServeConfig())
    assert limits.max_connections == 512
    assert "ulimit -n" in limited_protocol(limits, 16_384).most_connections
    few_files(65_536)
    assert fd_warning(ServeConfig()) is None
