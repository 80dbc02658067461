"""The stores through which the workers of a group find each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from swell.configs.runtime.network import listening_socket, other_ports
from swell.configs.schema import ClusterConfig
from swell.worker.comm.mesh import GROUP_TIMEOUT_S, GroupError, Mesh

LOOPBACK = ("localhost", "127.0.0.1", "::1")

CONNECT_S = 2.0
"""Timeout of one attempt to reach a store; between attempts the worker checks for an abort."""


class Stores:
    """The store that one worker hosts, and its connections to other stores."""

    def __init__(self, host: str, cluster: ClusterConfig) -> None:
        """`host`: an address returned by `reachable`."""
        self._host, self._cluster = host, cluster
        self._store: dist.TCPStore | None = None

    def open(self) -> tuple[str, int]:
        """Hosts a store that exists as long as this worker; returns (host, port)."""
        if self._store is None:
            # By default torch would listen at all addresses of the host.
            ports = other_ports(self._cluster.port_range)
            with listening_socket(self._host, ports) as listener:
                self._store = dist.TCPStore(
                    self._host,
                    listener.getsockname()[1],
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
        return self._host, self._store.port

    def connect(
        self, address: tuple[str, int], mesh: Mesh, absent: Sequence[int] = ()
    ) -> dist.Store:
        """Returns a client of the store at `address`, or the store that this worker hosts. Raises
        `GroupError`, with the `absent` engines, if the store does not answer until a timeout or an
        abort of the mesh."""
        host, port = address
        if self._store is not None and (self._store.host, self._store.port) == (
            reachable(host),
            port,
        ):
            return self._store
        deadline = time.monotonic() + GROUP_TIMEOUT_S
        while True:
            try:
                wait = timedelta(seconds=CONNECT_S)
                store = dist.TCPStore(reachable(host), port, is_master=False, timeout=wait)
                break
            except RuntimeError as error:
                if mesh.is_aborted or time.monotonic() > deadline:
                    text = f"the store at {host}:{port} does not answer: {error}"
                    raise GroupError(text.splitlines()[0], absent) from error
        store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
        return store

    def close(self) -> None:
        """Closes the store that this worker hosts."""
        self._store = None


def reachable(host: str) -> str:
    """Returns the loopback address for its names, which may resolve to an address where no store
    listens."""
    return "127.0.0.1" if host in LOOPBACK else host
