"""The thread that decides who may connect to an inbox; `handshakes.py` has the rules.

It answers ZeroMQ's authentication protocol (ZAP), which asks at the end of each CURVE handshake
whether the client's key is known, and reads the socket monitor of the inbox, which reports
connections. Both happen only when a peer connects: no message waits for this thread, and no
handshake waits for the thread of the inbox, which may be busy with a long step.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any

import zmq
from zmq.utils import z85

from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import exit_on_error
from swell.configs.runtime.secret import SecretBytes
from swell.coordinator.transport.handshakes import (
    HANDSHAKE_S,
    MAX_MESSAGE_BYTES,
    PendingHandshakes,
    zap_reply,
)

_ZAP = "inproc://zeromq.zap.01"
"""Address of ZAP requests, in each context."""
_MONITOR = "inproc://monitor"
_DOMAIN = b"swell"
_EVENT = struct.Struct("=hi")
"""A monitor event: its type and its value, here a file descriptor."""
_MAX_EVENTS = 4096
"""Monitor events that are handled before the next key request is answered: a flood of connections
must not delay the handshakes of peers without end."""


class Authenticator:
    """Authenticates peers of the one bound socket of a context. The thread stops when the context
    is terminated."""

    def __init__(
        self, context: Any, bound: Any, public_key: bytes, secret_key: SecretBytes
    ) -> None:
        """`bound`: the socket, before it is bound. Its keys, in Z85, are also those of all peers
        that may connect."""
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = public_key, secret_key
        bound.zap_domain = _DOMAIN
        bound.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody may connect
        bound.handshake_ivl = round(HANDSHAKE_S * 1000)
        bound.maxmsgsize = MAX_MESSAGE_BYTES
        self._allowed = frozenset({z85.decode(public_key)})
        self._pending = PendingHandshakes()
        self._log = StructuredLogger("coordinator.channel")
        self._zap = context.socket(zmq.REP)
        self._monitor = context.socket(zmq.PAIR)
        for end in (self._zap, self._monitor):
            end.linger = end.sndhwm = end.rcvhwm = 0
        self._zap.bind(_ZAP)
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        bound.monitor(_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | ended)
        self._monitor.connect(_MONITOR)
        run = exit_on_error(self._run, "authenticator")
        threading.Thread(target=run, name="swell-authenticator", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                request = self._zap.recv_multipart() if self._zap in ready else None
                # First: a connection that is refused after its handshake loses its messages.
                self._follow_connections()
                if request is not None:
                    self._zap.send_multipart(zap_reply(request, self._allowed))
        except zmq.ContextTerminated:
            self._zap.close()
            self._monitor.close()

    def _follow_connections(self) -> None:
        """Handles the events of the monitor, then refuses connections. A connection that was closed
        meanwhile is not touched: its file descriptor may belong to another one."""
        refused: set[int] = set()
        for _ in range(_MAX_EVENTS):
            if not self._monitor.poll(0):
                break
            event, value = _EVENT.unpack(self._monitor.recv_multipart()[0])
            match event:
                case zmq.EVENT_ACCEPTED:
                    if not self._pending.accepted(value, time.monotonic()):
                        refused.add(value)
                        self._log_refusal()
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._pending.succeeded(time.monotonic())
                case zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED:
                    self._pending.ended(value)
                    refused.discard(value)
        for connection in refused:
            _shut_down(connection)

    def _log_refusal(self) -> None:
        refused = self._pending.refused
        if refused.bit_count() == 1:  # the first, the second, the fourth ...
            self._log.warning(
                "connection refused: too many connections are not authenticated yet",
                refused=refused,
            )


def _shut_down(connection: int) -> None:
    """Shuts down a connection whose file descriptor belongs to ZeroMQ, which notices that and
    closes it. If it was closed meanwhile, the number may be that of another file; listening sockets
    are not touched."""
    with contextlib.suppress(OSError):  # the connection is gone
        number = os.dup(connection)
        try:
            copy = socket.socket(fileno=number)
        except OSError:  # the file with this number is not a socket
            os.close(number)
            return
        with copy:
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)
