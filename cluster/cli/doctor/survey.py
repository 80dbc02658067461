"""Everything that was found out about the hosts, as one value: what the checks read."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from swell.cluster.cli.doctor.facts import Fact, HostFacts, Link, Listener
from swell.cluster.control.room import resolve_device
from swell.configs.schema import Config


class Requirements(Fact, frozen=True):
    """Supported versions, as the installed package declares them."""

    python: str
    libraries: dict[str, str]
    """Distribution -> specifier, as `>=2.60,<3`."""


class Survey(Fact, frozen=True):
    requirements: Requirements
    hosts: dict[str, HostFacts]
    """By Ray's address of the host."""
    nodes: dict[str, dict[str, float]]
    """Ray's resources of each of them, and of those that did not answer."""
    config: Config | None = None
    address: str | None = None
    """Of the Ray cluster; None: this machine alone was asked."""
    silent: dict[str, str] = {}
    """Hosts that did not answer, or not to all, and why."""
    lost: dict[str, str] = {}
    """Hosts that Ray takes for dead, and why."""
    head: str | None = None
    """The host of Ray's GCS."""
    free: dict[str, dict[str, float]] = {}
    """What of the resources of each host nothing has reserved."""
    engines_running: int = 0
    """Engines of any Swell that the Ray cluster has."""
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
    """Of the installed package; nothing where it is not installed."""
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
