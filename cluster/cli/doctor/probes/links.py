"""Decides which hosts connect to which, and at which ports they listen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from swell.cluster.cli.doctor.facts import Listener, Part, Target
from swell.cluster.control.ray.http_port import ON_INTERFACE
from swell.configs.runtime.network import coordinator_ports, ingress_ports, other_ports
from swell.configs.schema import Config
from swell.coordinator.transport.ports import CHOSEN_PORTS

HTTP = "http"
"""The part for clients; the other parts are for connections between hosts."""
_STEPS = 8
"""Number of distances in the ring of hosts at which a host connects in both directions: up to 17
hosts connect to all others."""


def pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs (source, target), in both directions. Up to 17 hosts form all pairs. With more
    hosts, each one connects at eight distances in the ring of sorted names, powers of two first (1,
    2, 4 .. 128), so that every switch between two halves of the hosts is crossed."""
    ring = sorted(hosts)
    size = len(ring)
    powers_first = sorted(range(1, size // 2 + 1), key=lambda step: (step.bit_count() > 1, step))
    steps = powers_first[:_STEPS]
    found = {
        (place, (place + step * sign) % size)
        for place in range(size)
        for step in steps
        for sign in (1, -1)
    }
    return [(ring[source], ring[target]) for source, target in sorted(found)]


def parts(config: Config | None, address: str) -> list[Part]:
    """Returns the parts at which a host with this address listens: `docs/operate/network.md` has
    the sockets."""
    chosen = config.cluster.port_range if config else None
    found = [
        _part("coordinator", coordinator_ports(chosen) or CHOSEN_PORTS, address),
        _part("engines", other_ports(chosen), address),
    ]
    if config is None:
        return found
    parallel = config.parallel
    if chosen is not None and (parallel.pipeline > 1 or parallel.expert):
        found.append(_part("collectives", None, address))
    host = address if config.serve.host == ON_INTERFACE else config.serve.host
    if not _is_reachable(host):
        return found
    port = config.serve.port
    ports = range(port, port + 1) if port else ingress_ports(chosen) or CHOSEN_PORTS
    return [*found, _part(HTTP, ports, host)]


def targets(
    listeners: Mapping[str, Sequence[Listener]],
    addresses: Mapping[str, str],
    tried: Sequence[tuple[str, str]],
) -> dict[str, list[Target]]:
    """Returns the open listeners of the hosts to which each source connects, by source."""
    found: dict[str, list[Target]] = {source: [] for source, _ in tried}
    for source, name in tried:
        for listener in listeners.get(name, ()):
            if listener.error is None:
                host = addresses[name] if listener.host == "0.0.0.0" else listener.host
                found[source].append(
                    Target(name=name, part=listener.part, host=host, port=listener.port)
                )
    return found


def _part(name: str, ports: range | None, host: str) -> Part:
    first, last = (0, 0) if ports is None else (ports[0], ports[-1])
    return Part(name=name, first=first, last=last, host=host)


def _is_reachable(host: str) -> bool:
    """Whether other hosts can connect to a socket that listens there. Only IPv4, like Swell's own
    sockets."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback
