"""Facts of hosts: collected on each host (`probes/host_facts.py`), and checked by the process that
asked, as one `Survey`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

import msgspec
from packaging.requirements import Requirement

from swell.cluster.control.plan.resources import resolve_device
from swell.configs.runtime.secret import HoldsSecrets, SecretBytes
from swell.configs.schema import Config


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all facts. A host with another release of Swell may send fewer or more
    fields."""


class HostRequest(HoldsSecrets, Fact, frozen=True):
    """The request for the facts of a host."""

    node: str
    """The address by which Ray knows the host."""
    config: Config | None
    libraries: tuple[str, ...]
    """Distributions whose versions are requested."""
    salt: SecretBytes
    """Salt of the digests: it differs between runs, so a printed digest does not reveal a key."""
    timeout_s: float
    """How long the host may take to answer; each program that it runs gets a part of that."""


class TorchFacts(Fact, frozen=True):
    error: str | None = None
    """Why torch cannot be imported."""
    version: str = ""
    cuda: str | None = None
    """The CUDA version of the torch build; None: a CPU build."""
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    """The names of the GPUs that torch can use."""


class Gpu(Fact, frozen=True):
    """One GPU as `nvidia-smi` reports it; None: not reported."""

    index: int
    name: str
    driver: str
    memory_bytes: int | None
    used_bytes: int | None
    uncorrected_errors: int | None
    """Memory errors that ECC did not correct, since the driver was loaded."""


class GpuFacts(Fact, frozen=True):
    error: str | None = None
    """Why `nvidia-smi` failed; None also if it is not installed."""
    installed: bool = False
    gpus: tuple[Gpu, ...] = ()


class FileFacts(Fact, frozen=True):
    size_bytes: int
    digest: str
    """Digest of the content; for weights, of the file header that describes them."""


class DiskFacts(Fact, frozen=True):
    path: str
    total_bytes: int
    free_bytes: int


class MemoryFacts(Fact, frozen=True):
    total_bytes: int
    """Memory of the machine."""
    free_bytes: int
    """Memory that a new process may allocate, within the limit."""
    limit_bytes: int | None = None
    """Limit of the tightest control group of the process; None: there is no limit."""
    limit_source: str = ""
    """The file that has the limit."""


class CpuFacts(Fact, frozen=True):
    affinity: int
    """Cores on which the process may run."""
    quota: float | None = None
    """CPU quota of its control groups, in cores; None: there is no limit."""
    quota_source: str = ""
    """The file that has the quota."""


class RayFacts(Fact, frozen=True):
    """Settings of the Ray processes of this host."""

    token_authentication: bool
    check_period_s: float
    check_timeout_s: float
    check_failures: int
    """Failed health checks in a row after which the GCS declares a host dead."""
    force_stop_replicas: bool
    object_store_bytes: int
    session_folder: str | None
    """The folder of Ray's session, with its logs; None: unknown."""


class StartFacts(Fact, frozen=True):
    """Facts of a host that decide whether processes of a configuration can start there."""

    addresses: tuple[str, ...]
    """`interface address`, of every interface."""
    address: str | None
    """The address at which the host listens; None: it lacks an address at `cluster.interface`."""
    http_error: str | None
    """Why an ingress cannot listen; None: it can."""
    unreadable: dict[str, str]
    """Configuration key -> the file that cannot be read."""


class HostFacts(StartFacts, frozen=True):
    """All facts of a host."""

    swell_digest: str
    """Digest of the source of the package `swell`."""
    python: str
    libraries: dict[str, str | None]
    """Distribution -> version; None: not installed."""
    torch: TorchFacts
    gpus: GpuFacts
    compiler: str | None
    """The path and version of the C++ compiler; None: there is none that runs."""
    cores: int
    shm: DiskFacts | None
    disks: tuple[DiskFacts, ...]
    open_files: int
    """Limit of file descriptors of a process on this host; negative: unlimited."""
    model_error: str | None
    files: dict[str, FileFacts]
    """Files of the model and adapters by name, and files that the configuration names by key."""
    c_compiler: str | None = ""
    """The path and version of the C compiler; None: there is none that runs; empty: the host has an
    older release."""
    cpu: CpuFacts | None = None
    """The source of `cores`; None: the host has an older release."""
    memory: MemoryFacts | None = None
    processor: str | None = None
    """The kind of the processor; None: the host has an older release."""
    home_error: str | None = None
    """Why the home folder of the account cannot hold files; None: it can."""
    tmp_error: str | None = None
    """Why temporary files cannot be written; None: they can."""
    ray: RayFacts | None = None
    """Settings of Ray; None: collected without a Ray cluster."""


HTTP = "http"
"""The part for clients; the other parts are for connections between hosts."""


class Part(Fact, frozen=True):
    """A range of ports of a host, at which processes of one kind listen."""

    name: str
    first: int
    last: int
    """If `first` and `last` are 0: any port that the kernel chooses."""
    host: str
    """The address to listen at."""


class Listener(Fact, frozen=True):
    """A socket that was opened for the test of links, or the reason why it could not be opened."""

    part: str
    host: str
    port: int = 0
    error: str | None = None


class Target(Fact, frozen=True):
    """A listener and its host."""

    name: str
    part: str
    host: str
    port: int


class Link(Fact, frozen=True):
    """The result of one attempt to connect."""

    source: str
    target: str
    part: str
    port: int
    error: str | None = None
    offset_s: float = 0.0
    """How far the target's clock is ahead of the source's."""
    round_trip_s: float = 0.0
    """The error of `offset_s` is at most half of this."""


class Requirements(Fact, frozen=True):
    """Supported versions, as declared by the installed package."""

    python: str
    libraries: dict[str, str]
    """Distribution -> specifier, such as `>=2.60,<3`."""


class StartSurvey(Fact, frozen=True, kw_only=True):
    """The facts of the hosts that `swell serve --address` checks before the start."""

    hosts: Mapping[str, StartFacts]
    """Facts by Ray's address of the host."""
    config: Config | None = None
    engines_running: int = 0
    """The number of running engines in the Ray cluster, of any Swell application."""


class Survey(StartSurvey, frozen=True, kw_only=True):
    """Everything that is known about the hosts. The checks read it."""

    requirements: Requirements
    hosts: dict[str, HostFacts]
    nodes: dict[str, dict[str, float]]
    """Ray's resources by host, including hosts that did not answer."""
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
