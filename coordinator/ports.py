"""Ports of this machine: which are free."""

from __future__ import annotations

import errno
import random
import socket

from swell.configs.schema import ConfigError

_CHOSEN_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections: free again after a death."""


def port_is_free(host: str, port: int) -> bool:
    """Whether no process listens there, not even one that would share."""
    with socket.socket(address_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"serve.host={host!r}, serve.port={port} cannot be listened on: {error.strerror}"
            ) from None
    return True


def free_port(host: str) -> int:
    """One that a successor is likely to find free again."""
    ports = random.sample(_CHOSEN_PORTS, len(_CHOSEN_PORTS))
    return next(port for port in ports if port_is_free(host, port))


def next_free_port(host: str, first: int) -> int:
    return next(port for port in range(first, 65536) if port_is_free(host, port))


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
