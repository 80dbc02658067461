"""Checks the requirements of a configuration on every host of a Ray cluster before the start: Ray
may place engines, ingresses and manager on any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.cluster.cli.doctor.probes.host_files import named_paths, unreadable
from swell.cluster.control.ray.http_port import claim_port, listening_host
from swell.cluster.port_claim import PortClaims
from swell.configs.runtime.network import host_address
from swell.configs.schema import Config, ConfigError

_ANSWER_S = 60.0
"""How long a host may take to start a process and answer."""


def check_hosts(config: Config) -> None:
    """Raises ConfigError if a host of the connected Ray cluster cannot read a file, lacks an
    address at `cluster.interface`, or has another server at `serve.port`."""
    if text := refusal(_check_all_hosts(config)):
        raise ConfigError(text)


def problems(config: Config, node: str) -> list[str]:
    """Returns the missing requirements of this host, which Ray knows by the address `node`."""
    from swell.cluster.serve_status import is_of_this_ray

    paths = named_paths(config)
    found = [
        f"{key}: {paths[key]} cannot be read; each host needs it at the same path"
        for key in unreadable(paths)
    ]
    try:
        host_address(config.cluster.interface, node)
        claim_port(config, node)
        PortClaims().check(listening_host(config, node), config.serve.port, is_of_this_ray)
    except ValueError as error:
        found.append(str(error))
    return found


def refusal(found: Mapping[str, list[str]]) -> str | None:
    """Returns the error message for the problems of all hosts; None: there are none."""
    hosts: dict[str, list[str]] = {}
    for host in sorted(found):
        for problem in found[host]:
            hosts.setdefault(problem, []).append(host)
    parts = [f"on {', '.join(where)}: {problem}" for problem, where in hosts.items()]
    return "; ".join(parts) or None


def _check_all_hosts(config: Config) -> dict[str, list[str]]:
    """Returns the problems of each host by address. A host that does not answer is left out: Ray
    will not place anything on it either."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check: Any = ray.remote(num_cpus=0, max_retries=0)(problems)
    calls = {
        check.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(config, node["NodeManagerAddress"]): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
    }
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S)
    found = {}
    for call in done:
        try:
            found[calls[call]] = ray.get(call)
        except ray.exceptions.RayError:
            continue
    return found
