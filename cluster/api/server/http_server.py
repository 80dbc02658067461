"""The HTTP server that each ingress runs itself, on a port that all ingresses of a host share.

The kernel spreads connections over all sockets that listen with SO_REUSEPORT. A server that stops
closes its socket first, so that new connections go to the others, and then finishes its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn

from swell.cluster.api.server.connection import limited_protocol
from swell.configs.runtime import process
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ConfigError, ServeConfig
from swell.coordinator.transport.ports import address_family

_BACKLOG = 4096
"""The length of the accept queue; the kernel caps it at `net.core.somaxconn`. Clients beyond it try
again after a second."""
PER_TURN = 256
"""Connections accepted per turn: some 20 ms of work with the first bytes of each. A full kernel
queue is empty after 16 turns."""
PAUSE_S = 1.0
"""The pause after a failed accept, for lack of file descriptors or memory, before the next try."""

_RAISE_LIMIT = "`ulimit -n 65536`, LimitNOFILE= of systemd, --ulimit nofile= of Docker"
_FLUSH_S = 5.0
"""Extra time for sending the answers that are terminated when the drain timeout is over."""
_RESERVED_FDS = 512
"""File descriptors that are reserved for other purposes, and for connections that are being
refused."""


MIN_CONNECTIONS = 128
"""A process that could have fewer connections is useless, and does not start."""


def capped_by_fd_limit(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with `max_connections` capped by the file descriptors of this
    process: beyond them a client could not even be refused with an answer. Raises the soft limit of
    the process if allowed. Raises ConfigError if too few connections remain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _RESERVED_FDS
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = soft - _RESERVED_FDS
    if room < min(MIN_CONNECTIONS, config.max_connections):
        raise ConfigError(
            f"the limit of open files of this process is {soft} (ulimit -Hn); HTTP needs at least "
            f"{_RESERVED_FDS + MIN_CONNECTIONS}. Raise it: {_RAISE_LIMIT}"
        )
    return msgspec.structs.replace(config, max_connections=min(config.max_connections, room))


def fd_warning(config: ServeConfig) -> str | None:
    """Returns a warning about the limit of open files; None: the limit is high enough. Raises
    ConfigError."""
    room = capped_by_fd_limit(config).max_connections
    if room == config.max_connections:
        return None
    return (
        f"the limit of open files (ulimit -Hn) allows {room} connections instead of "
        f"serve.max_connections={config.max_connections}. Raise it: {_RAISE_LIMIT}"
    )


def _shared_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket(address_family(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class Acceptor:
    """Accepts connections from a listening socket, many in one turn of the event loop.

    uvloop accepts one per turn. A busy ingress has turns of several milliseconds, so it would
    accept only some hundred connections per second: a new client, or a probe of `/health`, would
    wait until all earlier ones are accepted. The requests of the connections begin a few at a time
    (`request_throttle.py`).

    To uvicorn it is a server: uvicorn calls `close` before it closes the listener, and then waits
    for `wait_closed`.
    """

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


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the owner of the process. It is woken when it should
    stop, instead of checking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn without sockets, and adds an `Acceptor` for each socket to `servers`,
        which uvicorn closes when it stops."""
        await super().startup(sockets=[])
        servers: list[Any] = self.servers  # uvicorn closes these and waits for them
        servers += [Acceptor(listener, self._protocol) for listener in sockets or ()]

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(counter=0):  # updates the `date` header of answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EdgeServer:
    """Serves an ASGI app in the running event loop until `stop`. `config` limits its
    connections."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        drain_timeout_s: float,
        config: ServeConfig,
    ) -> None:
        if (warning := fd_warning(config)) is not None:
            StructuredLogger("cluster.ingress").warning(warning)
        self._socket = _shared_socket(host, port)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=limited_protocol(capped_by_fd_limit(config), config.max_connections),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=round(drain_timeout_s + _FLUSH_S),
                server_header=False,
                ws="none",
            )
        )
        self._drain_timeout_s = drain_timeout_s
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Terminates the process if the server has stopped although `stop` was not called, so that
        the replica is replaced."""
        if not self._server.should_exit and not task.cancelled():
            process.exit_process(
                "HTTP server",
                task.exception() or RuntimeError("it stopped without a request to stop"),
            )

    async def stop(self, end_requests: Callable[[float], None] = lambda _: None) -> None:
        """Stops accepting, waits until the streams have finished, then returns. After the drain
        timeout it calls `end_requests` with that timeout, which terminates the unfinished requests
        with an error."""
        self._server.end()
        loop, limit_s = asyncio.get_running_loop(), self._drain_timeout_s
        timer = loop.call_later(limit_s, end_requests, limit_s)
        try:
            if self._task is not None:
                await self._task
        finally:
            timer.cancel()
        self._socket.close()
