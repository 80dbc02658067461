"""Takes connections from a listening socket, many in a turn of the event loop.

uvloop takes one a turn. A busy ingress has turns of several milliseconds, so a new client would
wait behind all who came before at some hundred a second, and a probe of `/health` as long. What a
connection then requests begins a few at a time (`request_throttle.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from swell.configs.log import StructuredLogger

PER_TURN = 256
"""Some 20 ms of work with the first bytes of each. A full queue of the kernel is empty after 16
turns."""
PAUSE_S = 1.0
"""Where none can be taken, for want of file descriptors or memory, until it is tried again."""


class Acceptor:
    """A server in the eyes of uvicorn, which closes it before the listener, and waits for it."""

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
        """Take no more; what was taken goes on."""
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
                self._log.error("no connection can be taken", error=str(error))
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
