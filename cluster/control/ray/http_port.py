"""Addresses of the HTTP servers: one port for all ingresses of an application, and one address on
each host."""

from __future__ import annotations

import msgspec

from swell.configs.runtime.network import PortsTakenError, host_address, ingress_ports
from swell.configs.schema import Config, ConfigError
from swell.coordinator.transport.ports import free_port, port_is_free

ON_INTERFACE = "interface"
"""The value of `serve.host` that selects the address of `cluster.interface`."""


def listening_host(config: Config, node: str) -> str:
    """Returns the address at which an ingress listens on the host that Ray knows by the address
    `node`. Raises ValueError if the host lacks the interface."""
    if config.serve.host != ON_INTERFACE:
        return config.serve.host
    return host_address(config.cluster.interface, node)


def claim_port(config: Config, node: str = "127.0.0.1") -> Config:
    """Returns a configuration whose `serve.port` is free on this host. Raises ConfigError if the
    port is taken, or if the host lacks the interface."""
    try:
        host, port = listening_host(config, node), config.serve.port
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if port == 0:
        return with_chosen_port(config, host)
    if not port_is_free(host, port):
        raise ConfigError(
            f"serve.port={port} on {host} is in use; stop what listens there or choose another "
            "port (--port P, or serve.port)"
        )
    return config


def with_chosen_port(config: Config, host: str) -> Config:
    """Returns the configuration with a free port. Raises ConfigError if no port of `cluster.ports`
    is free."""
    try:
        return with_port(config, free_port(host, ingress_ports(config.cluster.port_range)))
    except PortsTakenError as error:
        raise ConfigError(f"serve.port=0: {error.strerror}") from None


def with_port(config: Config, port: int) -> Config:
    return msgspec.structs.replace(config, serve=msgspec.structs.replace(config.serve, port=port))


def with_host(config: Config, node: str) -> Config:
    """Returns the configuration with the address at which an ingress of that host listens."""
    host = listening_host(config, node)
    return msgspec.structs.replace(config, serve=msgspec.structs.replace(config.serve, host=host))
