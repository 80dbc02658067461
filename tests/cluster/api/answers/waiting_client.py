"""Clients that read an answer as it arrives, while its request waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.cluster.fake_cluster import FakeCluster, body
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 3}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": body([5, 6], 4),
    "/v1/chat/completions": {**CHAT, "max_tokens": 4, "ignore_eos": True},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/responses": {
        "model": "fake",
        "input": "hi",
        "max_output_tokens": 4,
        "seed": 3,
        "store": False,
    },
}


def folder_of(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


class Peer:
    """One connection. Reads the answer as it arrives and removes the chunked encoding."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.head, self.came, self.ended = b"", b"", False

    async def ask(self, path: str, payload: dict[str, Any], **headers: str) -> None:
        data = json.dumps(payload).encode()
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await self.writer.drain()

    async def more(self) -> None:
        """Reads the head on the first call, then one part per call."""
        async with asyncio.timeout(HANG_S):
            if not self.head:
                self.head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
                return
            if b"content-length" in self.head:
                self.came += await self._reader.readexactly(self._length())
                self.ended = True
                return
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            self.came += (await self._reader.readexactly(size + 2))[:-2]
            self.ended = not size

    async def until(self, part: bytes, count: int = 1) -> None:
        while self.came.count(part) < count:
            await self.more()

    async def whole(self) -> bytes:
        while not self.ended:
            await self.more()
        return self.came

    @property
    def status(self) -> int:
        return int(self.head.split(b" ")[1])

    @property
    def has_bytes(self) -> bool:
        return bool(self.head) or bool(self._reader._buffer)  # type: ignore[attr-defined]

    def _length(self) -> int:
        lines = self.head.split(b"\r\n")
        (value,) = (line.split(b":")[1] for line in lines if line.startswith(b"content-length"))
        return int(value)


class World:
    """A cluster with one ingress, and its clients."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.port = cluster.edge.port
        """The port to which clients connect, which may be that of a proxy."""
        self.peers: list[Peer] = []

    async def ask(self, path: str, payload: dict[str, Any], **headers: str) -> Peer:
        opened = await asyncio.open_connection("127.0.0.1", self.port)
        self.peers.append(Peer(*opened))
        await self.peers[-1].ask(path, payload, **headers)
        return self.peers[-1]

    async def stream(self, path: str, **headers: str) -> Peer:
        return await self.ask(path, {**REQUESTS[path], "stream": True}, **headers)


@contextlib.asynccontextmanager
async def serving(folder: Path, drain_s: float = 5.0, **settings: Any) -> AsyncIterator[World]:
    cluster = FakeCluster(folder_of(folder), **settings)
    cluster.drain_s = drain_s
    async with cluster.serving():
        world = World(cluster)
        try:
            yield world
        finally:
            for peer in world.peers:
                peer.writer.close()
