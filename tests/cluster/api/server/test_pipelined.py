"""Pipelined requests on one connection: a refusal is sent in the order of the requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.api.server.connection import MAX_PIPELINED
from swell.cluster.api.server.http_server import EdgeServer
from swell.configs.schema import ServeConfig
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
BAD = {
    "no path": (b"GET nonsense HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    "no chunk": (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "no coding": (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    "a long URL": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
}


class Gate:
    """An application that answers a request with its path, after the gate is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
        while (await receive()).get("more_body", False):
            pass
        await self.open.wait()
        text = scope["path"].encode()
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@contextlib.asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[Gate, EdgeServer]]:
    gate = Gate()
    edge = EdgeServer(gate, "127.0.0.1", 0, 1, ServeConfig(**limits))
    await edge.start()
    try:
        async with asyncio.timeout(HANG_S):
            yield gate, edge
    finally:
        await edge.stop()


async def answers(gate: Gate, edge: EdgeServer, data: bytes, *, half_close: bool = False) -> bytes:
    """Returns everything until the server closes. Opens the gate when the first request runs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        while not gate.begun:
            await asyncio.sleep(0.001)
        gate.open.set()
        return await reader.read()
    finally:
        writer.close()


def statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("more", [1, 2, 500])
def test_the_first_request_beyond_the_limit_is_refused_after_earlier_answers(
    more: int, half_close: bool
) -> None:
    """One request is being answered, and 16 wait."""
    served_before = MAX_PIPELINED + 1

    async def scenario() -> None:
        async with served() as (gate, edge):
            sent = b"".join(GET % number for number in range(served_before + more))
            got = await answers(gate, edge, sent, half_close=half_close)
        assert statuses(got) == [200] * served_before + [400]
        assert gate.begun == [f"/{number}" for number in range(served_before)]
        assert b"too_many_requests" in got

    asyncio.run(scenario())


@given(st.integers(0, MAX_PIPELINED), st.sampled_from([*BAD]), st.booleans())
def test_a_refused_request_does_not_discard_earlier_answers(
    before: int, name: str, apart: bool
) -> None:
    bad, status = BAD[name]

    async def scenario() -> None:
        async with served() as (gate, edge):
            reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
            writer.write(b"".join(GET % number for number in range(before)))
            if apart and before:
                while not gate.begun:
                    await asyncio.sleep(0.001)
            writer.write(bad + GET % 99)
            await writer.drain()
            while before and not gate.begun:
                await asyncio.sleep(0.001)
            gate.open.set()
            got = await reader.read()
            writer.close()
        assert statuses(got) == [200] * before + [status]
        assert "/99" not in gate.begun

    asyncio.run(scenario())


def test_a_refused_body_does_not_discard_earlier_answers() -> None:
    """The refused request is already in the queue of the connection."""

    async def scenario() -> None:
        async with served() as (gate, edge):
            reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
            connections = edge._server.server_state.connections
            while not connections:
                await asyncio.sleep(0.001)
            (connection,) = connections
            head = b"POST /half HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.data_received(GET % 0 + GET % 1 + head + b"1\r\nx\r\n" * 5000)
            gate.open.set()
            got = await reader.read()
            writer.close()
        assert statuses(got) == [200, 200, 400] and gate.begun == ["/0", "/1"]

    asyncio.run(scenario())
