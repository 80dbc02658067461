"""Links between hosts: the choice of hosts and ports that are tried, listeners that know a token,
and attempts to reach them.

A connector sends the token and gets it back, which proves that neither another server nor a
middlebox answers. Then it asks for the time in several rounds. The round with the shortest round
trip gives the clock offset: the listener's time minus the connector's time in the middle of the
round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import msgspec

from swell.cluster.cli.doctor.facts import HTTP, Link, Listener, Part, Target
from swell.cluster.control.ray.http_port import ON_INTERFACE
from swell.configs.runtime.network import (
    coordinator_ports,
    ingress_ports,
    listening_socket,
    other_ports,
)
from swell.configs.runtime.secret import SecretBytes
from swell.configs.schema import Config
from swell.coordinator.transport.ports import CHOSEN_PORTS

_STEPS = 8
"""Number of distances in the ring of hosts at which a host connects in both directions: up to 17
hosts connect to all others."""
TOKEN_BYTES = 16
_ROUNDS = 5
_TIME = struct.Struct("!d")
_ASK = b"?"
_CONNECTION_S = 10.0
"""How long one connection may last at a listener."""
_CONNECTORS = 32
"""Maximum number of connections that a host opens at the same time."""


def pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs (source, target), in both directions. Up to 17 hosts form all pairs. With more
    hosts, each one connects at eight distances in the ring of sorted names, powers of two first (1,
    2, 4 .. 128), so that every switch between two halves of the hosts is crossed."""
    ring = sorted(hosts)
    size = len(ring)
    powers_first = sorted(range(1, size // 2 + 1), key=lambda step: (step.bit_count() > 1, step))
    steps = powers_first[:_STEPS]
    found = {
        (place, (place + step * sign) % size)
        for place in range(size)
        for step in steps
        for sign in (1, -1)
    }
    return [(ring[source], ring[target]) for source, target in sorted(found)]


def parts(config: Config | None, address: str) -> list[Part]:
    """Returns the parts at which a host with this address listens: `docs/operate/network.md` has
    the sockets."""
    chosen = config.cluster.port_range if config else None
    found = [
        _part("coordinator", coordinator_ports(chosen) or CHOSEN_PORTS, address),
        _part("engines", other_ports(chosen), address),
    ]
    if config is None:
        return found
    parallel = config.parallel
    if chosen is not None and (parallel.pipeline > 1 or parallel.expert):
        found.append(_part("collectives", None, address))
    host = address if config.serve.host == ON_INTERFACE else config.serve.host
    if not _is_reachable(host):
        return found
    port = config.serve.port
    ports = range(port, port + 1) if port else ingress_ports(chosen) or CHOSEN_PORTS
    return [*found, _part(HTTP, ports, host)]


def targets(
    listeners: Mapping[str, Sequence[Listener]],
    addresses: Mapping[str, str],
    tried: Sequence[tuple[str, str]],
) -> dict[str, list[Target]]:
    """Returns the open listeners of the hosts to which each source connects, by source."""
    found: dict[str, list[Target]] = {source: [] for source, _ in tried}
    for source, name in tried:
        for listener in listeners.get(name, ()):
            if listener.error is None:
                host = addresses[name] if listener.host == "0.0.0.0" else listener.host
                found[source].append(
                    Target(name=name, part=listener.part, host=host, port=listener.port)
                )
    return found


def _part(name: str, ports: range | None, host: str) -> Part:
    first, last = (0, 0) if ports is None else (ports[0], ports[-1])
    return Part(name=name, first=first, last=last, host=host)


def _is_reachable(host: str) -> bool:
    """Whether other hosts can connect to a socket that listens there. Only IPv4, like Swell's own
    sockets."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback


class LinkListeners:
    """The listeners of this host, open until `close`."""

    def __init__(self, token: SecretBytes, clock: Callable[[], float] = time.time) -> None:
        self._token = token
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []

    def open(self, part: Part) -> Listener:
        """Listens at a free port of this part. If that fails, the result has the error."""
        ports = range(part.first, part.last + 1) if part.first else None
        try:
            bound = listening_socket(part.host, ports)
        except OSError as error:
            return Listener(part=part.name, host=part.host, error=error.strerror or str(error))
        serve = asyncio.start_server(self._answer, sock=bound, limit=TOKEN_BYTES)
        self._servers.append(asyncio.run_coroutine_threadsafe(serve, self._loop).result())
        return Listener(part=part.name, host=part.host, port=bound.getsockname()[1])

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = (OSError, TimeoutError, asyncio.IncompleteReadError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECTION_S):
                if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
                    return
                writer.write(self._token)
                for _ in range(_ROUNDS):
                    await reader.readexactly(len(_ASK))
                    writer.write(_TIME.pack(self._clock()))
                    await writer.drain()


def try_links(
    source: str, targets: Sequence[Target], token: SecretBytes, timeout_s: float
) -> list[Link]:
    """Connects to all targets concurrently; each attempt times out after `timeout_s`."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), _CONNECTORS)) as pool:
        return list(pool.map(lambda target: try_link(source, target, token, timeout_s), targets))


def try_link(
    source: str,
    target: Target,
    token: SecretBytes,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> Link:
    link = Link(source=source, target=target.name, part=target.part, port=target.port)
    try:
        trips = _trips(target, token, timeout_s, clock)
    except TimeoutError:
        return msgspec.structs.replace(link, error=f"no answer after {timeout_s:g} s")
    except ConnectionRefusedError:
        return msgspec.structs.replace(link, error="refused")
    except OSError as error:
        return msgspec.structs.replace(link, error=error.strerror or str(error))
    round_trip_s, offset_s = min(trips)
    return msgspec.structs.replace(link, offset_s=offset_s, round_trip_s=round_trip_s)


def _trips(
    target: Target, token: SecretBytes, timeout_s: float, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((target.host, target.port), timeout_s) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(token)
        if _read(sock, len(token), deadline) != token:
            raise ConnectionError("another program answers there")
        return [_trip(sock, deadline, clock) for _ in range(_ROUNDS)]


def _trip(sock: socket.socket, deadline: float, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the round trip time and the offset of the other clock, in seconds."""
    sent, began = clock(), time.monotonic()
    sock.sendall(_ASK)
    (there,) = _TIME.unpack(_read(sock, _TIME.size, deadline))
    round_trip_s = time.monotonic() - began
    return round_trip_s, there - (sent + round_trip_s / 2)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Returns `size` bytes. Raises TimeoutError, and ConnectionError if the peer has closed."""
    data = b""
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end closed the connection")
        data += more
    return data
