"""The port of the HTTP server: one for all ingresses of an application."""

from __future__ import annotations

import msgspec

from swell.configs.schema import Config, ConfigError
from swell.coordinator.ports import free_port, port_is_free


def claim_port(config: Config) -> Config:
    """A configuration whose `serve.port` is free. Raises ConfigError if it is taken."""
    host, port = config.serve.host, config.serve.port
    if port == 0:
        return with_port(config, free_port(host))
    if not port_is_free(host, port):
        raise ConfigError(
            f"serve.port={port} on {host} is in use; stop what listens there or choose another "
            "port (--port P, or serve.port)"
        )
    return config


def with_port(config: Config, port: int) -> Config:
    return msgspec.structs.replace(config, serve=msgspec.structs.replace(config.serve, port=port))
