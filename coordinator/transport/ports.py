"""Finds free ports of this machine."""

from __future__ import annotations

import errno
import random
import socket

from swell.configs.runtime.network import PortsTakenError
from swell.configs.schema import ConfigError

CHOSEN_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of the kernel, so that no outgoing connection takes the port after its
owner died."""


def port_is_free(host: str, port: int) -> bool:
    """Whether no process listens on the port, not even one that would share it."""
    with socket.socket(address_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"no process can listen at {host}:{port} on this host: {error.strerror}"
            ) from None
    return True


def free_port(host: str, ports: range | None = None) -> int:
    """Returns a free port of `ports`; if None, one that a restarted process will probably find free
    again. Raises PortsTakenError."""
    chosen = CHOSEN_PORTS if ports is None else ports
    for port in random.sample(chosen, len(chosen)):
        if port_is_free(host, port):
            return port
    raise PortsTakenError(host, chosen)


def next_free_port(host: str, first: int) -> int:
    return next(port for port in range(first, 65536) if port_is_free(host, port))


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
