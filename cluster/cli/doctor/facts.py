"""What is known of one host: collected there (`fact_collector.py`, `host_probe.py`), checked by
who asked."""

from __future__ import annotations

import msgspec

from swell.configs.schema import Config
from swell.configs.secret import HoldsSecrets, SecretBytes


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all. A host with another version of Swell may send fewer fields, or more."""


class HostRequest(HoldsSecrets, Fact, frozen=True):
    """What a host is asked for."""

    node: str
    """The address by which Ray knows the host."""
    config: Config | None
    libraries: tuple[str, ...]
    """Distributions whose versions count."""
    salt: SecretBytes
    """Of the digests: those of two runs differ, so that a printed one says nothing of a key."""
    timeout_s: float
    """How long the host may take to answer; each program that it runs gets a part of that."""


class TorchFacts(Fact, frozen=True):
    error: str | None = None
    """Why it cannot be imported."""
    version: str = ""
    cuda: str | None = None
    """The CUDA version for which it was built; None: for CPU."""
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    """The names of those that torch can use."""


class Gpu(Fact, frozen=True):
    """As `nvidia-smi` has it; None: it does not say."""

    index: int
    name: str
    driver: str
    memory_bytes: int | None
    used_bytes: int | None
    uncorrected_errors: int | None
    """Memory errors since the driver was loaded that ECC did not correct."""


class GpuFacts(Fact, frozen=True):
    error: str | None = None
    """Why `nvidia-smi` has no answer; None also where there is no `nvidia-smi`."""
    installed: bool = False
    gpus: tuple[Gpu, ...] = ()


class FileFacts(Fact, frozen=True):
    size_bytes: int
    digest: str
    """Of the content; of a file with weights, of the header that describes them."""


class DiskFacts(Fact, frozen=True):
    path: str
    total_bytes: int
    free_bytes: int


class MemoryFacts(Fact, frozen=True):
    total_bytes: int
    """Of the machine."""
    free_bytes: int
    """What a new process may allocate, within the limit."""
    limit_bytes: int | None = None
    """Of the tightest control group of the process; None: there is no limit."""
    limit_source: str = ""
    """The file that has the limit."""


class CpuFacts(Fact, frozen=True):
    affinity: int
    """Cores on which the process may run."""
    quota: float | None = None
    """Cores' worth of time that its control groups allow; None: there is no limit."""
    quota_source: str = ""
    """The file that has the quota."""


class RayFacts(Fact, frozen=True):
    """Settings of the Ray processes of this host."""

    token_authentication: bool
    check_period_s: float
    check_timeout_s: float
    check_failures: int
    """So many health checks in a row fail before the GCS takes a host for dead."""
    force_stop_replicas: bool
    object_store_bytes: int
    session_folder: str | None
    """Where Ray has its logs; None: unknown."""


class HostFacts(Fact, frozen=True):
    swell_digest: str
    """Of the source of the package `swell`."""
    python: str
    libraries: dict[str, str | None]
    """None: not installed."""
    torch: TorchFacts
    gpus: GpuFacts
    compiler: str | None
    """The compiler's path and version; None: there is none that runs."""
    cores: int
    shm: DiskFacts | None
    disks: tuple[DiskFacts, ...]
    open_files: int
    """So many file descriptors a process of this host may have."""
    addresses: tuple[str, ...]
    """`interface address`, of every interface."""
    address: str | None
    """Where the host listens; None: it has no address at `cluster.interface`."""
    http_error: str | None
    """Why no ingress could listen."""
    unreadable: dict[str, str]
    """Key of the configuration -> the file that cannot be read."""
    model_error: str | None
    files: dict[str, FileFacts]
    """Every file of the model, and those that the configuration names by key."""
    cpu: CpuFacts | None = None
    """Where `cores` comes from; None: a host with another version does not say."""
    memory: MemoryFacts | None = None
    home_error: str | None = None
    """Why no file can be kept in the home of the account."""
    tmp_error: str | None = None
    """Why no temporary file can be written."""
    ray: RayFacts | None = None
    """None: asked without a Ray cluster."""


class Part(Fact, frozen=True):
    """A part of the ports of a host, at which some processes listen."""

    name: str
    first: int
    last: int
    """Both 0: any port that the kernel gives."""
    host: str
    """The address to listen at."""


class Listener(Fact, frozen=True):
    """A socket that was opened for the test of links, or the reason why not."""

    part: str
    host: str
    port: int = 0
    error: str | None = None


class Target(Fact, frozen=True):
    """A listener, and the host that has it."""

    name: str
    part: str
    host: str
    port: int


class Link(Fact, frozen=True):
    """What one attempt to connect gave."""

    source: str
    target: str
    part: str
    port: int
    error: str | None = None
    offset_s: float = 0.0
    """How far the target's clock is ahead of the source's."""
    round_trip_s: float = 0.0
    """The offset is wrong by half of it at most."""
