"""The only code that uses sockets: ZeroMQ with msgspec frames, encrypted with CURVE.

An `Inbox` is bound by the side that serves many peers; an `Outlet` is connected by one of the
peers. A message is one frame: a tagged Struct, decoded by the typed decoder of its receiver
(`codec.py`). Messages between two peers keep their order. An inbox drops messages that it cannot
deliver; an outlet queues messages until its peer is reachable.

An inbox listens twice: on an abstract `ipc` name for peers on its machine (not a file, so a killed
process leaves no trace), and on TCP for others.

The keys of a cluster are distributed through Ray. Without them no process completes the handshake
(`authenticator.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from swell.configs.runtime import process
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.network import bind_free_port
from swell.configs.runtime.secret import HoldsSecrets, SecretBytes
from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.authenticator import Authenticator
from swell.coordinator.transport.codec import FrameDecoder, encode
from swell.coordinator.transport.handshakes import HANDSHAKE_S

M = TypeVar("M")

_LINGER_MS = 1000
"""How long a closing socket tries to deliver queued messages."""
_RETRY_S = 0.05
"""Delay between two attempts to bind an address that is in use."""
_LOG_EVERY_ATTEMPTS = 100
"""Number of attempts after which the warning is logged again."""
DEFAULT_SILENCE_S = 10.0
"""Time without data after which a connection counts as dead."""
CONNECT_S = 2.0
"""Timeout for the first packet of a connection, which TCP repeats once in this time."""
_MAX_BURST = 4096
"""Maximum number of messages that are delivered at a time."""
_MAX_SOCKETS = 49_152
"""Maximum number of sockets of one context; each `AsyncOutlet` has three, with its monitor."""


class ChannelKeys(HoldsSecrets, frozen=True, array_like=True):
    """The CURVE key pair that all members of a cluster share."""

    public: bytes
    secret: SecretBytes

    def derive(self, purpose: str) -> SecretBytes:
        """[32] A secret that all members share, derived for one purpose."""
        return hmac.digest(self.secret, purpose.encode(), "sha256")


class ChannelAddress(msgspec.Struct, frozen=True, array_like=True):
    """Addresses on which an inbox is reachable."""

    machine: str
    """Processes with the same value can connect to each other with `ipc`."""
    ipc: str
    tcp: str


class ChannelTimeout(TimeoutError):
    """A call was not answered within its deadline."""


def make_keys() -> ChannelKeys:
    public, secret = zmq.curve_keypair()
    return ChannelKeys(public, secret)


def this_machine() -> str:
    """Identifies the network namespace of this boot, within which abstract socket names are
    shared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"process-{os.getpid()}"
    return f"{boot.read_text().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


def _wait(socket: Any, timeout_s: float | None, waker: Waker | None) -> bool:
    """Waits for a message or for the waker. Returns whether the socket has a message."""
    timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
    if waker is None or timeout_ms == 0:  # the wake-up then interrupts the next wait
        return bool(socket.poll(timeout_ms))
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(waker.fileno(), zmq.POLLIN)
    ready = dict(poller.poll(timeout_ms))
    if waker.fileno() in ready:
        waker.clear()
    return socket in ready


@functools.cache
def _context_of(pid: int) -> Any:
    """The one context, with two threads, of all sockets of a process that close without waiting."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


class Inbox(Generic[M]):
    """The bound end: receives from many peers, and answers each by its identity. Not
    thread-safe."""

    def __init__(
        self,
        message_type: Any,
        keys: ChannelKeys,
        host: str = "127.0.0.1",
        *,
        name: str | None = None,
        port: int = 0,
        ports: range | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        """`name` and `port`: addresses of a predecessor; the constructor waits until they are free.
        If not specified, they are chosen here, the port by `bind_free_port`. `silence_s`: see
        `detect_silence`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.router_handover = True
        detect_silence(self._socket, silence_s)
        Authenticator(self._context, self._socket, keys.public, keys.secret)
        try:
            self._bind(ipc := f"ipc://@swell-{name or secrets.token_hex(8)}")
            if port:
                self._bind(f"tcp://{host}:{port}")
            else:
                bind_free_port(host, ports, lambda free: self._socket.bind(f"tcp://{host}:{free}"))
        except BaseException:
            self._socket.close(linger=0)
            self._context.term()
            raise
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = ChannelAddress(this_machine(), ipc, endpoint)
        self._frame_decoder: FrameDecoder[M] = FrameDecoder(message_type)

    @property
    def malformed(self) -> int:
        """Number of frames that were dropped because they did not decode."""
        return self._frame_decoder.malformed

    def _bind(self, address: str) -> None:
        for attempt in itertools.count():
            try:
                self._socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
            if attempt % _LOG_EVERY_ATTEMPTS == 0:
                StructuredLogger("coordinator.channel").warning(
                    "address is in use", address=address
                )
            time.sleep(_RETRY_S)

    def send(self, peer: bytes, message: Any) -> None:
        """Queues a message; it is dropped if the peer is gone."""
        self.send_to_all((peer,), message)

    def send_to_all(self, peers: Iterable[bytes], message: Any) -> None:
        """Sends a message to each peer; it is encoded once."""
        frame = encode(message)
        for peer in peers:
            self._socket.send_multipart((peer, frame), copy=True)

    def receive(
        self, timeout_s: float = 0.0, waker: Waker | None = None
    ) -> Iterator[tuple[bytes, M]]:
        """Calls `ready`, then `take`."""
        if self.ready(timeout_s, waker):
            yield from self.take()

    def ready(self, timeout_s: float | None = 0.0, waker: Waker | None = None) -> bool:
        """Waits for a message or for the waker, up to `timeout_s` (None: forever). Returns whether
        there is a message."""
        return _wait(self._socket, timeout_s, waker)

    def take(self) -> Iterator[tuple[bytes, M]]:
        """Yields the messages that are there, without waiting. A large number is delivered in
        parts, so that the receiver can do other work in between."""
        for _ in range(_MAX_BURST):
            try:
                peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            message = self._frame_decoder.decode(frame)
            if message is not None:
                yield peer, message

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Outlet(Generic[M]):
    """The connected end, for use in one thread. Not thread-safe."""

    def __init__(
        self,
        address: ChannelAddress,
        message_type: Any,
        keys: ChannelKeys,
        identity: bytes | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        """`silence_s`: see `detect_silence`."""
        self._context = self._make_context()
        self._address, self._keys, self._silence_s = address, keys, silence_s
        self.identity = identity or secrets.token_bytes(8).replace(b"\0", b"\1")
        """Identifies this connection at the inbox."""
        self._frame_decoder: FrameDecoder[M] = FrameDecoder(message_type)
        self._open()

    def _open(self) -> None:
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.identity = self.identity
        detect_silence(self._socket, self._silence_s)
        connect_soon(self._socket)
        self._socket.curve_serverkey = self._keys.public
        self._socket.curve_publickey = self._keys.public
        self._socket.curve_secretkey = self._keys.secret
        self._prepare()
        address = self._address
        self._socket.connect(address.ipc if address.machine == this_machine() else address.tcp)

    def _make_context(self) -> Any:
        return zmq.Context()

    def _prepare(self) -> None:
        """Prepares the socket before it is connected."""

    @property
    def malformed(self) -> int:
        """Number of frames that were dropped because they did not decode."""
        return self._frame_decoder.malformed

    def send(self, message: Any) -> None:
        """Queues a message. Never waits."""
        frame = encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._open_if_ended()
            with contextlib.suppress(zmq.Again):  # the new connection failed already
                self._socket.send(frame, zmq.NOBLOCK)

    def _open_if_ended(self) -> None:
        """Reconnects a socket that ZeroMQ has closed because the other end violates the protocol,
        for example a program that has reused a dead peer's port. Queued messages are lost, as with
        any dropped connection."""
        if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            self._close_socket()
            self._open()

    def receive(self, timeout_s: float | None = 0.0, waker: Waker | None = None) -> M | None:
        """Calls `ready`, then `take`; returns None if there is no message."""
        return self.take() if self.ready(timeout_s, waker) else None

    def ready(self, timeout_s: float | None = 0.0, waker: Waker | None = None) -> bool:
        """Same as `Inbox.ready`."""
        is_ready = _wait(self._socket, timeout_s, waker)
        if not is_ready:
            self._open_if_ended()
        return is_ready

    def take(self) -> M | None:
        """Returns the next message, once there is one; None for a frame that does not decode."""
        return self._frame_decoder.decode(self._socket.recv())

    def _close_socket(self) -> None:
        self._socket.close()

    def close(self) -> None:
        self._close_socket()
        self._context.term()


class AsyncOutlet(Outlet[M]):
    """The connected end for the running event loop, which calls `take` with each message. Neither
    sending nor closing ever waits: messages that a dead peer has not received are dropped.

    ZeroMQ's file descriptor signals once for all available messages, and any use of the socket may
    consume that signal. Therefore all available messages are received at once, and checked for
    again after sending. ZeroMQ's own asyncio sockets cost one wake-up and several futures per
    message.
    """

    def __init__(
        self,
        address: ChannelAddress,
        message_type: Any,
        keys: ChannelKeys,
        take: Callable[[M], None],
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        super().__init__(address, message_type, keys, silence_s=silence_s)

    def _open(self) -> None:
        super()._open()
        self._fd: int = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._drain)

    def send(self, message: Any) -> None:
        super().send(message)
        self._look_again()

    def _look_again(self) -> None:
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _make_context(self) -> Any:
        return _context_of(os.getpid())

    def _prepare(self) -> None:
        """Starts the monitor before the socket connects, because it would miss an earlier
        handshake."""
        self._is_connected = False
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        name = f"inproc://{secrets.token_hex(8)}"
        self._monitor = self._socket.get_monitor_socket(events, name)

    def is_connected(self) -> bool:
        """Whether the peer is reachable, as far as is known."""
        self._open_if_ended()
        self._look_again()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._is_connected

    def close(self) -> None:
        if not self._socket.closed:
            self._close_socket()

    def _close_socket(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        """Delivers messages. On an error the process exits: if messages were no longer received,
        every answer would wait forever."""
        try:
            self._deliver()
        except Exception as error:
            process.exit_process("channel", error)

    def _deliver(self) -> None:
        """Delivers the available messages; a frame that does not decode is skipped, as by an
        inbox."""
        for _ in range(_MAX_BURST):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._frame_decoder.decode(frame)
            if message is not None:
                self._take(message)
        self._loop.call_soon(self._drain)


def detect_silence(socket: Any, silence_s: float) -> None:
    """Closes a connection at both sides if nothing has arrived for `silence_s`, although ZeroMQ's
    own threads, which also run during a long step, send heartbeats. ZeroMQ then reconnects;
    messages in transit are lost."""
    silence_ms = round(silence_s * 1000)
    socket.heartbeat_ivl = silence_ms // 4
    socket.heartbeat_timeout = socket.tcp_maxrt = silence_ms - silence_ms // 4


def connect_soon(socket: Any) -> None:
    """Sets timeouts for connection attempts, after which ZeroMQ retries.

    TCP repeats the first packet after 1, 3, 7, 15, 31 and 63 s: without a timeout, a restored link
    could stay unused for as long as it was down.
    """
    socket.connect_timeout = round(CONNECT_S * 1000)
    socket.handshake_ivl = round(HANDSHAKE_S * 1000)
