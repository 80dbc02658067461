"""Which hosts connect to which, and where they listen meanwhile: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from swell.cluster.cli.doctor.facts import Listener, Part, Target
from swell.cluster.control.http_port import ON_INTERFACE
from swell.configs.network import coordinator_ports, ingress_ports, other_ports
from swell.configs.schema import Config
from swell.coordinator.ports import CHOSEN_PORTS

HTTP = "http"
"""The part at which clients connect; the others are for the hosts among each other."""
_STEPS = 8
"""So many places before and after a host are those to which it connects: of up to 17 hosts all."""


def pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """(source, target). Each pair of hosts in both directions; of more than 17 hosts each connects
    to those 1, 2, 4, 8 .. 128 places before and after it, in order of their names, so that every
    switch between two halves of the hosts is crossed."""
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
    """Where a host listens whose address is this one: `docs/operate/network.md` has the sockets."""
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
    """By source: every open listener of the hosts that it connects to."""
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
    """Whether other hosts can connect to a socket that listens there; over IPv4 alone, as Swell's
    own sockets do."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.version == 4 and not address.is_loopback
