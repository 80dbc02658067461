"""Messages of an untrusted peer that reaches a socket of a cluster but has none of its secrets.

`listening` finds the sockets on which processes listen. `visit` connects to one and sends a knock.
A `Recorder` captures what others send over the loopback interface, so that it can be replayed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq

_LISTEN = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""
_UNIX_LISTENS = 0x10000
"""The flag in `/proc/net/unix` for a socket that accepts connections."""
_SO_RCVBUFFORCE = 33
_ANSWER_S = 0.2
_CONNECT_S = 2
_RECORD_BYTES = 1 << 18
"""The recorded bytes per client: handshakes and some thousand frames."""
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))


@dataclass(frozen=True, order=True)
class Door:
    """A listening socket. `family` is tcp or unix. `address` is an IP address, or the path or
    `@name` of a Unix socket, whose port is 0."""

    family: str
    address: str
    port: int = 0

    def connect(self, limit_s: int = _CONNECT_S) -> socket.socket:
        """Connects to the socket. Raises OSError if there is no answer within `limit_s`."""
        if self.family == "unix":
            untrusted_peer = socket.socket(socket.AF_UNIX)
            limit = struct.pack("ll", limit_s, 0)  # a nonblocking connect would fail if others wait
            untrusted_peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            untrusted_peer.connect(self.address.replace("@", "\0", 1))
            return untrusted_peer
        here = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(self.address, self.address)
        return socket.create_connection((here, self.port), limit_s)


def listening(pids: Iterable[int]) -> dict[int, set[Door]]:
    """Returns pid -> its listening sockets, in the network namespace of this process."""
    tables: dict[str, Door] = {}
    for name, family in _TABLES:
        for line in _rows(f"/proc/net/{name}"):
            if line[3] == _LISTEN:
                number, _, port = line[1].partition(":")
                words = (number[at : at + 8] for at in range(0, len(number), 8))
                address = b"".join(bytes.fromhex(word)[::-1] for word in words)
                tables[line[9]] = Door("tcp", socket.inet_ntop(family, address), int(port, 16))
    for line in _rows("/proc/net/unix"):
        if int(line[3], 16) & _UNIX_LISTENS:
            tables[line[6]] = Door("unix", line[7] if len(line) > 7 else "")
    return {pid: {tables[inode] for inode in _inodes(pid) & tables.keys()} for pid in pids}


def _rows(table: str) -> list[list[str]]:
    with contextlib.suppress(OSError):  # protocol not available
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return []


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # the process is gone
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                    found.add(match[1])
    return found


# -------------------------------------------------------------------------------- knocks


def greeting(mechanism: bytes) -> bytes:
    """Returns the ZMTP 3.1 greeting of a client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def _command(name: bytes, body: bytes) -> bytes:
    frame = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(frame)) + frame


def knocks() -> dict[str, bytes]:
    """Returns name -> bytes that can be sent without any secret."""
    noise = random.Random(0)
    hello = b"\x01\x00" + bytes(72) + noise.randbytes(32) + bytes(8) + noise.randbytes(80)
    announced = struct.pack(">Q", 2**40)
    return {
        "nothing": b"",
        "one byte": b"\xff",
        "noise": noise.randbytes(4096),
        "zeros": bytes(4096),
        "http": b"GET /admin/cluster HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "zmtp null": greeting(b"NULL") + _command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER"),
        "zmtp plain": greeting(b"PLAIN") + _command(b"HELLO", b"\x04user\x04pass"),
        "zmtp curve": greeting(b"CURVE") + _command(b"HELLO", hello),
        "zmtp endless": greeting(b"CURVE") + b"\x06" + announced + noise.randbytes(4096),
        "sequence numbers": b"".join(struct.pack("<q", number) for number in range(16)),
        "store query": b"\x00\xce\xf7\x85\x3c" + b"\x02" + struct.pack("<Q", 3) + b"key",
    }


def visit(door: Door, knock: bytes) -> bytes:
    """Connects, sends, and reads what arrives within a moment. Returns empty bytes if nothing
    answers."""
    answer = b""
    with contextlib.suppress(OSError), door.connect() as untrusted_peer:
        untrusted_peer.settimeout(_ANSWER_S)
        untrusted_peer.sendall(knock)
        while (more := untrusted_peer.recv(65536)) and len(answer) < 1 << 20:
            answer += more
    return answer


def knock_with_keys(door: Door, public: bytes, secret: bytes, server: bytes, frame: bytes) -> bool:
    """Connects as a ZeroMQ peer with these keys and sends a frame. Returns whether anything came
    back."""
    where = (
        f"ipc://{door.address}" if door.family == "unix" else f"tcp://{door.address}:{door.port}"
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as untrusted_peer:
        untrusted_peer.linger = 0
        untrusted_peer.curve_serverkey = server
        untrusted_peer.curve_publickey, untrusted_peer.curve_secretkey = public, secret
        untrusted_peer.connect(where)
        with contextlib.suppress(zmq.Again):  # refused so soon that the connection is gone
            untrusted_peer.send(frame, zmq.NOBLOCK)
        return bool(untrusted_peer.poll(_ANSWER_S * 1000))


# -------------------------------------------------------------------------------- recorded traffic


class Recorder:
    """Captures all TCP over the loopback interface, i.e. what clients have sent to each port. Needs
    the permission to open packet sockets."""

    def __init__(self) -> None:
        self._segments: dict[tuple[Any, ...], dict[int, bytes]] = defaultdict(dict)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        with contextlib.suppress(PermissionError):  # otherwise the kernel's limit applies
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 27)
        self._socket.bind(("lo", 0x0003))
        self._socket.settimeout(0.1)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                self._take(self._socket.recv(1 << 17))

    def _take(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        tcp = packet[(packet[0] & 15) * 4 : int.from_bytes(packet[2:4], "big") or None]
        source, target, number = struct.unpack_from(">HHI", tcp)
        if payload := tcp[(tcp[12] >> 4) * 4 :]:
            connection = (packet[12:16], source, packet[16:20], target)
            self._segments[connection].setdefault(number, payload)

    def sent_to(self, port: int) -> Iterator[bytes]:
        """Yields the first bytes that each client has sent to that port, up to the first gap."""
        for (_, _, _, target), segments in list(self._segments.items()):
            if target == port:
                whole, expected = bytearray(), min(segments)
                while expected in segments and len(whole) < _RECORD_BYTES:
                    whole += segments[expected]
                    expected += len(segments[expected])
                yield bytes(whole)
