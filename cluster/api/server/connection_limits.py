"""The limits of one server's connections that its configuration sets."""

from __future__ import annotations

import resource

import msgspec

from swell.cluster.api.server.cors import CorsRules
from swell.configs.schema import ServeConfig

_RESERVED_FDS = 512
"""What else a process has open, and connections that are being refused."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """`ServeConfig` describes them."""

    connections: int
    head_timeout_s: float
    transfer_timeout_s: float
    cors: CorsRules = CorsRules()
    """Which pages may read why they were refused."""

    def capped_by_fd_limit(self) -> ConnectionLimits:
        """These, or with as many connections as this process may have file descriptors for: beyond
        them no client could be refused with an answer. Its own limit is raised where it may be."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections + _RESERVED_FDS
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        room = max(1, soft - _RESERVED_FDS)
        return msgspec.structs.replace(self, connections=min(self.connections, room))

    @staticmethod
    def of(config: ServeConfig) -> ConnectionLimits:
        return ConnectionLimits(
            config.max_connections,
            config.head_timeout_s,
            config.transfer_timeout_s,
            CorsRules.of(config),
        )
