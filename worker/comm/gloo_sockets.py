"""The sockets of a gloo group (CPU only), which gloo does not expose. They are found among the file
descriptors of the process, by the addresses at which the ranks of the group listen.

gloo cannot abort an operation that blocks: the operation fails only when its connection breaks. So
an abort shuts the connections down, which looks like the death of the peer to both ends. Also, gloo
accepts and keeps every connection; so once a group is formed, the kernel refuses further ones.

This needs Linux (`/proc/self/fd`). NCCL has its own abort and must never use this module: workers
on GPUs use `Transport` as it is.
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
"""The filter instruction that returns how many bytes of a packet pass: none."""

_listening = threading.Lock()
"""Held while a device is made, so that each thread finds its own listening socket."""


def listening_device(host: str) -> tuple[dist.ProcessGroupGloo.Device, Address]:
    """Returns a gloo device at `host`, and the address at which it listens."""
    make = dist.ProcessGroupGloo
    with _listening:
        while True:
            before = set(_listeners())
            device = make.create_device(hostname=host, lazy_init=False)
            found = set(_listeners()) - before
            if len(found) == 1:  # otherwise another part of the process began to listen meanwhile
                return device, found.pop()


def refuse_connections(address: Address) -> None:
    """Makes the kernel drop everything that arrives at the socket that listens there: the group is
    formed, and its connections are other sockets."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    for sock in _sockets():
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and sock.getsockname()[:2] == address:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def shut_down_connections(members: set[Address]) -> None:
    """Shuts down all sockets of this process that are connected from or to one of `members`."""
    for sock in _sockets():
        try:
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & members:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The socket only listens, or its connection is closed."""


def _listeners() -> Iterator[Address]:
    """Yields the addresses at which this process listens for connections."""
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield sock.getsockname()[:2]


def _sockets() -> Iterator[socket.socket]:
    """Yields the internet sockets of this process; each is a duplicate that is closed before the
    next."""
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
