"""Accepts connections from a listening socket, many in one turn of the event loop.

uvloop accepts one per turn. A busy ingress has turns of several milliseconds, so it would accept
only some hundred connections per second: a new client, or a probe of `/health`, would wait until
all earlier ones are accepted. The requests of the connections begin a few at a time
(`request_throttle.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from swell.configs.runtime.log import StructuredLogger

PER_TURN = 256
"""Connections accepted per turn: some 20 ms of work with the first bytes of each. A full kernel
queue is empty after 16 turns."""
PAUSE_S = 1.0
"""The pause after a failed accept, for lack of file descriptors or memory, before the next try."""


class Acceptor:
    """Accepts connections. To uvicorn it is a server: uvicorn calls `close` before it closes the
    listener, and then waits for `wait_closed`."""

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], asyncio.Protocol],
    ) -> None:
        self._listener = listener
        self._protocol_factory = protocol_factory
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._log = StructuredLogger("cluster.ingress")
        self._listen()

    def close(self) -> None:
        """Stops accepting; accepted connections continue."""
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()

    async def wait_closed(self) -> None:
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _listen(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._log.error("cannot accept connections", error=str(error))
                self._loop.remove_reader(self._listener)
                self._paused = self._loop.call_later(PAUSE_S, self._listen)
                return
            begun = self._loop.create_task(self._begin(connection))
            self._connecting.add(begun)
            begun.add_done_callback(self._connecting.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except OSError:  # it has left already
            connection.close()
