"""A TCP proxy that can reset connections, and hold back one or both directions."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Literal

Direction = Literal["up", "down"]
"""From the client (up) or to it (down)."""

_ABORT = struct.pack("ii", 1, 0)
"""A value of SO_LINGER with which closing sends a reset."""
_CHUNK_BYTES = 1 << 16
_LOOK_S = 0.01


class TcpProxy:
    """Forwards to one port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        """Number of connections accepted so far."""
        self._gates = {"up": threading.Event(), "down": threading.Event()}
        for gate in self._gates.values():
            gate.set()
        self._pairs: list[_Pair] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Resets all connections; held data is lost."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.abort()

    def hold(self, *directions: Direction) -> None:
        """Forwards nothing in these directions, not even the end of a connection."""
        for direction in directions:
            self._gates[direction].clear()

    def release(self) -> None:
        """Forwards held data, and continues."""
        for gate in self._gates.values():
            gate.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self.accepted += 1
            self._pairs.append(_Pair(client, server, self._gates))


class _Pair:
    """The connection of a client, and the proxy's connection to the target."""

    def __init__(
        self, client: socket.socket, server: socket.socket, gates: dict[str, threading.Event]
    ) -> None:
        self._sockets = (client, server)
        self._gates = gates
        self._aborted = False
        ways = ((client, server, "up"), (server, client, "down"))
        self._threads = [threading.Thread(target=self._pump, args=w, daemon=True) for w in ways]
        for thread in self._threads:
            thread.start()

    def abort(self) -> None:
        self._aborted = True
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RD)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            each.close()

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            while True:
                chunk = source.recv(_CHUNK_BYTES)
                while not self._gates[direction].wait(_LOOK_S) and not self._aborted:
                    pass
                if self._aborted:
                    return
                if not chunk:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(chunk)
        except OSError:
            pass
