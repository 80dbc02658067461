"""Connects the ranks of a group, on the transport of their device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from swell.worker.comm.gloo_transport import connect_gloo, gloo_key
from swell.worker.comm.group_secret import GroupSecret
from swell.worker.comm.nccl_transport import connect_nccl
from swell.worker.comm.shared_memory_transport import connect_shared_memory
from swell.worker.comm.transport import POLL_S, Formation, PeersAbsent, Transport


def connect_cpus(formation: Formation) -> Transport:
    """Connects the ranks of a group through shared memory where that is possible."""
    transport = None if formation.has_messages else connect_shared_memory(formation)
    return transport or connect_gloo(formation)


TRANSPORTS: dict[str, Callable[[Formation], Transport]] = {
    "cpu": connect_cpus,
    "cuda": connect_nccl,
}
"""Device type -> the function that connects the ranks of a group."""


def connect(
    device: torch.device | str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    aborted: threading.Event,
    secret: GroupSecret,
    host: str = "127.0.0.1",
    has_messages: bool = True,
) -> Transport:
    """Finds the other ranks through `store` and connects to them, if they know the secret.

    `host`: the address of this machine at which the other ranks reach it. The address to which the
    machine's own host name resolves does not matter. `has_messages`: see `Formation`.

    Raises `PeersAbsent` if peers do not publish their addresses in time, or have not when `aborted`
    is set, or if their hosts do not answer; `ForeignAddress` and `ForeignMember` if an untrusted
    peer poses as a peer; `RuntimeError` if the store or peers are gone.
    """
    device = torch.device(device)
    keys = dist.PrefixStore(secret.prefix, store)
    published = [gloo_key(rank)]

    def exchange(topic: str, text: str) -> list[str]:
        published.append(f"{topic}{rank}")
        keys.set(published[-1], secret.sign(rank, topic, text))
        names = [f"{topic}{peer}" for peer in range(size)]
        deadline = time.monotonic() + timeout_s
        while not keys.check(names):
            is_aborted = aborted.wait(POLL_S)
            if is_aborted or time.monotonic() > deadline:
                absent = [peer for peer in range(size) if not keys.check(names[peer : peer + 1])]
                when = "before it was aborted" if is_aborted else f"in {timeout_s:g} s"
                raise PeersAbsent(f"ranks {absent} of {size} did not connect {when}", absent)
        if aborted.is_set():
            raise RuntimeError("it was aborted")
        return [
            secret.open(peer, topic, keys.get(name).decode()) for peer, name in enumerate(names)
        ]

    formation = Formation(
        store=keys,
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        exchange=exchange,
        has_messages=has_messages,
        secret=secret,
        host=host,
        device=device,
        aborted=aborted,
    )
    transport = TRANSPORTS[device.type](formation)
    # Each rank has read these keys before it took part in `check_members`. A store lives longer
    # than the groups that form through it.
    for key in published:
        keys.delete_key(key)
    return transport
