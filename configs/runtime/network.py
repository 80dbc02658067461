"""Chooses the address and the ports on which this host listens.

Every socket of Swell listens on one address, `host_address`, and announces it to its peers in
numeric form. The host's name is never resolved.

`cluster.ports` is divided into three parts. The first eighth is for coordinators and the second
eighth for ingresses with `serve.port` 0: both keep their port, so that a replacement is reachable
where its predecessor was. All other sockets bind any free port of the rest and announce it to those
that need it. Therefore no other process can take the port of a coordinator that is restarting.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import os
import random
import re
import socket
import struct
from collections.abc import Callable

_SIOCGIFCONF = 0x8912
"""The ioctl that returns the IPv4 addresses of all interfaces."""
_ROW_BYTES = 40
"""Size of one entry in the result: a name of 16 bytes, then a socket address."""
_MOST_ADDRESSES = 1024
_INTERFACE = re.compile(r"[^\s/:]{1,15}\Z")
"""Name of an interface, as Linux allows it."""
_PORTS = re.compile(r"(\d{4,5})-(\d{4,5})\Z")
_ALLOWED_PORTS = frozenset(range(1024, 65536))
_FEWEST_PORTS = 16
"""Enough for two coordinators, during a takeover, and three engines on one host."""
_KEPT_PART = 8
"""Coordinators get one port in this many, and ingresses the same number."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The environment variable that selects NCCL's network interface."""


def check_interface(text: str) -> None:
    """Raises ValueError unless the text is the name of an interface or an IPv4 network."""
    if "/" not in text and _INTERFACE.match(text):
        return
    try:
        ipaddress.IPv4Network(text if "/" in text else "", strict=False)
    except ValueError:
        raise ValueError(
            f"cluster.interface={text!r}: write the name of an interface, such as 'eth1', or its "
            "IPv4 network, such as '10.1.0.0/16'"
        ) from None


def parse_ports(text: str) -> range:
    """Parses the port range `A-B`. Raises ValueError."""
    found = _PORTS.match(text)
    ports = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if len(ports) < _FEWEST_PORTS or not {ports[0], ports[-1]} <= _ALLOWED_PORTS:
        raise ValueError(
            f"cluster.ports={text!r}: write 'A-B', at least {_FEWEST_PORTS} ports from "
            f"{min(_ALLOWED_PORTS)} to {max(_ALLOWED_PORTS)}"
        )
    return ports


class PortsTakenError(OSError):
    """Raised if every port of a range is in use."""

    def __init__(self, host: str, ports: range) -> None:
        super().__init__(
            errno.EADDRINUSE,
            f"none of the ports {ports[0]}-{ports[-1]} is free on {host}; set a larger range in "
            "cluster.ports, or stop the processes that listen there",
        )


def coordinator_ports(ports: range | None) -> range | None:
    """Returns the part of `cluster.ports` that is for coordinators."""
    return None if ports is None else ports[: len(ports) // _KEPT_PART]


def ingress_ports(ports: range | None) -> range | None:
    """Returns the part of `cluster.ports` that is for ingresses."""
    if ports is None:
        return None
    size = len(ports) // _KEPT_PART
    return ports[size : 2 * size]


def other_ports(ports: range | None) -> range | None:
    """Returns the part of `cluster.ports` that any other socket may use."""
    return None if ports is None else ports[2 * (len(ports) // _KEPT_PART) :]


def bind_free_port(host: str, ports: range | None, bind: Callable[[int], object]) -> None:
    """Calls `bind`, which listens on `host`, with `ports` in random order until one is free; with
    port 0, which means any free port, if `ports` is None. Raises PortsTakenError."""
    if ports is None:
        bind(0)
        return
    for port in random.sample(ports, len(ports)):
        try:
            bind(port)
            return
        except Exception as error:  # ZeroMQ's error is not an OSError
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    raise PortsTakenError(host, ports)


def listening_socket(host: str, ports: range | None) -> socket.socket:
    """Returns a socket that listens on a free port. Raises PortsTakenError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bind_free_port(host, ports, lambda port: listener.bind((host, port)))
    listener.listen()
    return listener


def host_address(interface: str | None, node: str) -> str:
    """Returns the address on which this host listens: the first address that matches
    `cluster.interface`, or without it the address of its Ray node. Raises ValueError if no address
    of the host matches."""
    if interface is None:
        return node
    there = addresses()
    found = [address for name, address in there if _is_in(interface, name, address)]
    if not found:
        shown = ", ".join(f"{name} {address}" for name, address in there) or "none"
        raise ValueError(
            f"cluster.interface={interface!r} has no IPv4 address on the host {node}; its "
            f"addresses: {shown}"
        )
    return found[0]


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has this address, or None if this host does not have
    it."""
    return next((name for name, other in addresses() if other == address), None)


def addresses() -> list[tuple[str, str]]:
    """Returns (interface name, IPv4 address) pairs of this host, in the kernel's order."""
    rows = array.array("B", bytes(_ROW_BYTES * _MOST_ADDRESSES))
    place, room = rows.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", room, place))
    size: int = struct.unpack("iP", answer)[0]
    found = []
    for start in range(0, size, _ROW_BYTES):
        row = rows[start : start + _ROW_BYTES].tobytes()
        label = row[:16].partition(b"\0")[0].decode()
        found.append((label.partition(":")[0], socket.inet_ntoa(row[20:24])))
    return found


def prepare_for_nccl(host: str, interface: str | None) -> None:
    """Makes NCCL use the interface that has the address `host`. A value that the user has set for
    NCCL is kept, unless `cluster.interface` selects the interface of the whole cluster."""
    name = interface_of(host)
    if name is not None and (interface is not None or NCCL_INTERFACE not in os.environ):
        os.environ[NCCL_INTERFACE] = f"={name}"


def _is_in(interface: str, name: str, address: str) -> bool:
    """Whether `cluster.interface` matches this address. A network such as 0.0.0.0/0 does not match
    the loopback address."""
    if "/" not in interface:
        return name == interface
    network, found = ipaddress.IPv4Network(interface, strict=False), ipaddress.IPv4Address(address)
    return found in network and found.is_loopback == network.is_loopback
