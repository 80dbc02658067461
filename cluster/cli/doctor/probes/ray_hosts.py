"""Collects the facts of every host of a Ray cluster through one actor on each. A host that does not
answer before a deadline is reported, and does not delay the others. The actors answer in JSON, so
that another release of Swell on a host is reported instead of breaking the answer."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from swell.cluster.cli.doctor.facts import (
    HostFacts,
    HostRequest,
    Link,
    Listener,
    Part,
    RayFacts,
    Requirements,
    StartFacts,
    StartSurvey,
    Survey,
    Target,
)
from swell.cluster.cli.doctor.probes import links
from swell.cluster.cli.doctor.probes.host_facts import collect, collect_start_facts
from swell.cluster.cli.start.ray_address import probe_address
from swell.configs.runtime.hanging_calls import within
from swell.configs.runtime.log import first_line
from swell.configs.runtime.secret import SecretBytes
from swell.configs.schema import Config, ConfigError

T = TypeVar("T")
RayNode = dict[str, Any]
"""An entry of `ray.nodes()`."""

_GCS_S = 20.0
"""How long Ray's GCS may take to connect, to list, or to disconnect."""
_START_S = 60.0
"""How long a host may take to start a process and collect the facts for a start."""
_LISTEN_S = 10.0
_LINK_S = 5.0
"""How long one attempt to connect may take; Linux sends the first packet three times by then."""
_HEAD = "node:__internal_head__"
"""Ray's resource of the host of its GCS."""
_ENGINE, _PLACED = "-engine-", "CREATED"
"""Part of the name of an engine's placement group, and the state of a group that has its
resources."""
_ENDED_BY_REQUEST = "EXPECTED_TERMINATION"
_FORCE_STOP = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"


class ClusterSilent(RuntimeError):
    """Raised if the Ray cluster does not answer; the message is the reason, in one line."""


def ask_cluster(
    address: str, config: Config | None, requirements: Requirements, timeout_s: float
) -> Survey:
    """Connects to the cluster and asks all hosts; each step takes up to `timeout_s`. Raises
    ClusterSilent."""
    with _connected(address):
        nodes = _ask_gcs(address, ray.nodes)
        groups = _ask_gcs(address, placement_group_table)
        free = _ask_gcs(address, available_resources_per_node)
        alive = _living(nodes)
        with _Probes(alive, timeout_s) as probes:
            hosts = probes.facts(config, requirements)
            listeners = probes.listeners(config, hosts)
            addresses = {name: facts.address or "" for name, facts in hosts.items()}
            tried = links.pairs([name for name, found in listeners.items() if found])
            found = probes.links(links.targets(listeners, addresses, tried))
        return Survey(
            requirements=requirements,
            hosts=hosts,
            nodes={name: node["Resources"] for name, node in alive.items()},
            config=config,
            address=address,
            silent=probes.silent,
            lost=_lost(nodes),
            head=next((name for name, node in alive.items() if _HEAD in node["Resources"]), None),
            free={name: free.get(node["NodeID"], {}) for name, node in alive.items()},
            engines_running=sum(
                group["state"] == _PLACED and _ENGINE in group["name"] for group in groups.values()
            ),
            listeners=listeners,
            tried=tried,
            links=found,
        )


def ask_start_facts(config: Config) -> StartSurvey:
    """Asks all hosts of the connected cluster. A host that does not answer is left out: Ray will
    not place anything on it either. Raises ClusterSilent."""
    nodes = _living(_ask_gcs(ray.get_runtime_context().gcs_address, ray.nodes))
    with _Probes(nodes, _START_S) as probes:
        return StartSurvey(hosts=probes.start_facts(config), config=config)


class _Probes:
    """One actor on each host, and the requests to all of them. The actors are killed at the end of
    the context; actors that this does not reach exit with this process."""

    def __init__(self, nodes: Mapping[str, RayNode], timeout_s: float) -> None:
        self._nodes = nodes
        self._timeout_s = timeout_s
        self.silent: dict[str, str] = {}
        """Hosts that left some request unanswered, and why."""
        token = secrets.token_bytes(links.TOKEN_BYTES)
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(HostProbe)
        self._actors = {
            name: actor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(token)
            for name, node in nodes.items()
        }

    def __enter__(self) -> _Probes:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError, RayError):
            within(_GCS_S, self._end)

    def _end(self) -> None:
        for probe in self._actors.values():
            ray.kill(probe)

    def start_facts(self, config: Config) -> dict[str, StartFacts]:
        calls = {
            name: self._actors[name].start_facts.remote(config, node["NodeManagerAddress"])
            for name, node in self._nodes.items()
        }
        return self._answers(calls, StartFacts, self._timeout_s)

    def facts(self, config: Config | None, requirements: Requirements) -> dict[str, HostFacts]:
        salt = secrets.token_bytes(links.TOKEN_BYTES)
        calls = {}
        for name, node in self._nodes.items():
            request = HostRequest(
                node=node["NodeManagerAddress"],
                config=config,
                libraries=tuple(requirements.libraries),
                salt=salt,
                timeout_s=self._timeout_s,
            )
            store_bytes = int(node["Resources"].get("object_store_memory", 0))
            calls[name] = self._actors[name].facts.remote(request, store_bytes)
        return self._answers(calls, HostFacts, self._timeout_s)

    def listeners(
        self, config: Config | None, hosts: Mapping[str, HostFacts]
    ) -> dict[str, list[Listener]]:
        calls = {
            name: self._actors[name].listen.remote(links.parts(config, facts.address))
            for name, facts in hosts.items()
            if facts.address is not None
        }
        return self._answers(calls, list[Listener], _LISTEN_S)

    def links(self, targets: Mapping[str, Sequence[Target]]) -> list[Link]:
        calls = {
            name: self._actors[name].connect.remote(name, there, _LINK_S)
            for name, there in targets.items()
        }
        answers = self._answers(calls, list[Link], self._timeout_s)
        return [link for name in sorted(answers) for link in answers[name]]

    def _answers(self, calls: Mapping[str, Any], kind: type[T], timeout_s: float) -> dict[str, T]:
        """Returns the answers that arrive in time, and records why the others do not."""
        names = {call: name for name, call in calls.items()}
        done = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)[0] if names else []
        found = {}
        for call in done:
            try:
                found[names[call]] = msgspec.json.decode(ray.get(call, timeout=_GCS_S), type=kind)
            except (RayError, TimeoutError, msgspec.DecodeError) as error:
                self.silent[names[call]] = _reason(error, timeout_s)
        for call in names.keys() - set(done):
            self.silent[names[call]] = _reason(TimeoutError(), timeout_s)
        return {name: found[name] for name in calls if name in found}


def _ask_gcs(address: str, call: Callable[[], T]) -> T:
    try:
        return within(_GCS_S, call)
    except (TimeoutError, RayError) as error:
        raise ClusterSilent(f"{address}: Ray's GCS: {_reason(error, _GCS_S)}") from None


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connects to Ray. Its messages about lost hosts go to standard error, not into the report."""
    with contextlib.redirect_stdout(sys.stderr):
        yield from _connection(address)


def _connection(address: str) -> Iterator[None]:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        probe_address(address)
    except ConfigError as error:
        raise ClusterSilent(str(error)) from None
    try:
        within(_GCS_S, partial(ray.init, address=address, namespace="swell", **quiet))
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterSilent(f"{address}: {_reason(error, _GCS_S)}") from None
    try:
        yield
    finally:
        with contextlib.suppress(TimeoutError):
            within(_GCS_S, ray.shutdown)


def _living(nodes: Sequence[RayNode]) -> dict[str, RayNode]:
    """Returns the nodes that live, by address; if several nodes have the same address, the start of
    the id is appended."""
    found: dict[str, RayNode] = {}
    alive = [node for node in nodes if node["Alive"]]
    for node in sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        name = node["NodeManagerAddress"]
        found[f"{name}/{node['NodeID'][:6]}" if name in found else name] = node
    return found


def _lost(nodes: Sequence[RayNode]) -> dict[str, str]:
    """Returns the hosts without a living node that were not removed on purpose, and why."""
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return {
        node["NodeManagerAddress"]: node.get("DeathReasonMessage") or "Ray considers it dead"
        for node in nodes
        if not node["Alive"] and node["NodeManagerAddress"] not in alive
        if node.get("DeathReason") != _ENDED_BY_REQUEST
    }


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer after {timeout_s:g} s"
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {first_line(cause)}"


class HostProbe:
    """The actor that runs on every host during a survey."""

    def __init__(self, token: SecretBytes) -> None:
        self._token = token
        self._listeners: links.LinkListeners | None = None

    def start_facts(self, config: Config, node: str) -> bytes:
        """Returns `StartFacts`."""
        return msgspec.json.encode(collect_start_facts(config, node))

    def facts(self, request: HostRequest, object_store_bytes: int) -> bytes:
        """Returns `HostFacts`."""
        return msgspec.json.encode(collect(request, _ray_facts(object_store_bytes)))

    def listen(self, parts: list[Part]) -> bytes:
        """Opens listeners that live as long as this process. Returns `list[Listener]`."""
        self._listeners = self._listeners or links.LinkListeners(self._token)
        return msgspec.json.encode([self._listeners.open(part) for part in parts])

    def connect(self, source: str, targets: list[Target], timeout_s: float) -> bytes:
        """Tries to connect to the targets. Returns `list[Link]`."""
        return msgspec.json.encode(links.try_links(source, targets, self._token, timeout_s))


def _ray_facts(object_store_bytes: int) -> RayFacts:
    """Returns the settings of Ray. All processes of a node have the same environment, on the head
    including the GCS."""
    from ray._private import worker
    from ray._private.authentication.authentication_utils import is_token_auth_enabled
    from ray._raylet import Config  # type: ignore[attr-defined]

    node = worker._global_node
    return RayFacts(
        token_authentication=is_token_auth_enabled(),
        check_period_s=Config.health_check_period_ms() / 1000,
        check_timeout_s=Config.health_check_timeout_ms() / 1000,
        check_failures=Config.health_check_failure_threshold(),
        force_stop_replicas=os.environ.get(_FORCE_STOP) == "1",
        object_store_bytes=object_store_bytes,
        session_folder=node.get_session_dir_path() if node is not None else None,
    )
