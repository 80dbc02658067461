"""Survey: everything that is known about the hosts, in one value. The checks read it."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from swell.cluster.cli.doctor.facts import Fact, HostFacts, Link, Listener
from swell.cluster.control.plan.room import resolve_device
from swell.configs.schema import Config


class Requirements(Fact, frozen=True):
    """Supported versions, as declared by the installed package."""

    python: str
    libraries: dict[str, str]
    """Distribution -> specifier, such as `>=2.60,<3`."""


class Survey(Fact, frozen=True):
    requirements: Requirements
    hosts: dict[str, HostFacts]
    """Facts by Ray's address of the host."""
    nodes: dict[str, dict[str, float]]
    """Ray's resources by host, including hosts that did not answer."""
    config: Config | None = None
    address: str | None = None
    """The address of the Ray cluster; None: only this machine was checked."""
    silent: dict[str, str] = {}
    """Hosts that left some request unanswered, and why."""
    lost: dict[str, str] = {}
    """Hosts that Ray declared dead, and why."""
    head: str | None = None
    """The host of Ray's GCS."""
    free: dict[str, dict[str, float]] = {}
    """The free resources of each host."""
    engines_running: int = 0
    """The number of running engines in the Ray cluster, of any Swell application."""
    listeners: dict[str, list[Listener]] = {}
    tried: list[tuple[str, str]] = []
    """(source, target) of all attempts to connect."""
    links: list[Link] = []

    @property
    def resolved(self) -> Config | None:
        """The configuration with the device that the engines will use."""
        total: dict[str, float] = {}
        for node in self.nodes.values():
            for name, amount in node.items():
                total[name] = total.get(name, 0.0) + amount
        return resolve_device(self.config, total) if self.config else None


def read_requirements() -> Requirements:
    """Returns the requirements of the installed package; empty if it is not installed."""
    try:
        found = importlib.metadata.metadata("swell")
        wanted = [Requirement(line) for line in importlib.metadata.requires("swell") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Requirements(python="", libraries={})
    return Requirements(
        python=found["Requires-Python"] or "",
        libraries={
            item.name: str(item.specifier)
            for item in wanted
            if item.marker is None or item.marker.evaluate({"extra": ""})
        },
    )
