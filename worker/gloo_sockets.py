"""CPU only: the sockets of a gloo group, which gloo does not give out. They are found among the
file descriptors of the process, by the addresses at which the ranks of the group listen.

gloo has no working abort for an operation that blocks: it ends when its connection does. So an
abort shuts the connections down, which looks like the death of the peer to both ends. And gloo
accepts and keeps whatever connects to it: so a group that is formed lets the kernel refuse.

It needs Linux (`/proc/self/fd`). NCCL aborts by itself and must never come here: workers on GPUs
use `Transport` as it is.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator

import torch.distributed as dist

Address = tuple[str, int]
"""Host and port."""

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
"""The filter's instruction that returns how many bytes of a packet pass: none."""

_listening = threading.Lock()
"""Held while a device is made, so that each thread finds its own listening socket."""


def listening_device(host: str) -> tuple[dist.ProcessGroupGloo.Device, Address]:
    """A device of gloo's at `host`, and the address at which it listens."""
    make = dist.ProcessGroupGloo
    with _listening:
        while True:
            before = set(_listeners())
            device = make.create_device(hostname=host, lazy_init=False)
            found = set(_listeners()) - before
            if len(found) == 1:  # else another part of the process began to listen meanwhile
                return device, found.pop()


def refuse_connections(address: Address) -> None:
    """Let the kernel drop whatever comes to the socket that listens there: the group is formed, and
    its connections are other sockets."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    for sock in _sockets():
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and sock.getsockname()[:2] == address:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def shut_down_connections(members: set[Address]) -> None:
    """Shut down all sockets of this process that are connected from or to one of `members`."""
    for sock in _sockets():
        try:
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & members:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The socket only listens, or its connection has ended."""


def _listeners() -> Iterator[Address]:
    """Where this process listens for connections."""
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield sock.getsockname()[:2]


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process; each is a duplicate that is closed before the next."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            copy = os.dup(int(fd))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # not a socket any more
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
