"""Checks of each host: versions, processor, memory, disks, files, GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from packaging.specifiers import SpecifierSet

from swell.cluster.cli.doctor.checks import Finding, Verdict, minority, to_findings
from swell.cluster.cli.doctor.facts import HostFacts, Survey
from swell.configs.schema import ServeConfig

_COMPILER_MAJOR = 12
MIB = 2**20
SHM_FREE_BYTES = 256 * MIB
"""Required for NCCL and gloo; containers often have only 64 MiB in total."""
MEMORY_FREE_BYTES = 1024 * MIB
"""Required for Ray's processes, Serve's controller, the manager, an ingress and a small KV
cache."""
WEIGHTS = (".safetensors", ".gguf")
DISK_FREE_BYTES = 2 * 2**30
DISK_FREE_PART = 0.05
"""Ray treats a disk with less free space as full."""
RESERVED_FILES = 1024
"""File descriptors that an ingress needs in addition to its connections."""
USED_GPU_PART = 0.05
"""Share of a GPU's memory that drivers and displays may use."""


def python(survey: Survey) -> list[Finding]:
    """Checks Python. Ray also refuses processes with another patch level."""
    values = {host: facts.python for host, facts in survey.hosts.items()}
    specifier = survey.requirements.python
    verdicts = {
        **minority(values),
        **{
            host: Verdict(value, specifier)
            for host, value in values.items()
            if not _is_in(value, specifier)
        },
    }
    return to_findings("python", list(values), verdicts, _one(values.values()))


def libraries(survey: Survey) -> list[Finding]:
    """Returns one finding for each library with a wrong version on some host. For torch only the
    part before `+` counts: hosts without a GPU may have its CPU build."""
    names = survey.requirements.libraries
    versions = {
        name: {
            host: (facts.libraries.get(name) or "not installed").partition("+")[0]
            for host, facts in survey.hosts.items()
        }
        for name in names
    }
    found = []
    for name, values in versions.items():
        odd = minority(values) | {
            host: Verdict(value, names[name] or "installed")
            for host, value in values.items()
            if value == "not installed" or not _is_in(value, names[name])
        }
        verdicts = {
            host: Verdict(f"{name} {verdict.value}", verdict.expected)
            for host, verdict in odd.items()
        }
        found += to_findings("libraries", list(values), verdicts, "") if verdicts else []
    texts = (f"{name} {_one(values.values())}" for name, values in versions.items())
    return found or to_findings("libraries", list(survey.hosts), {}, ", ".join(texts))


def swell(survey: Survey) -> list[Finding]:
    values = {host: f"source {facts.swell_digest}" for host, facts in survey.hosts.items()}
    return to_findings("swell", list(values), minority(values), _one(values.values()))


def torch(survey: Survey) -> list[Finding]:
    verdicts = {
        host: Verdict(facts.torch.error, "torch can be imported")
        for host, facts in survey.hosts.items()
        if facts.torch.error is not None
    }
    builds = sorted({facts.torch.version for facts in survey.hosts.values()})
    return to_findings("torch", list(survey.hosts), verdicts, ", ".join(builds))


def compiler(survey: Survey) -> list[Finding]:
    """Checks the compiler, unless engines run on GPUs: CPU kernels are compiled where engines run
    on CPUs."""
    config = survey.resolved
    if config is not None and config.model.device == "cuda":
        return []
    expected = f"g++ {_COMPILER_MAJOR} or later"
    verdicts = {
        host: Verdict(facts.compiler or "no g++ that runs", expected)
        for host, facts in survey.hosts.items()
        if _major(facts.compiler) < _COMPILER_MAJOR
    }
    texts = sorted({facts.compiler or "" for facts in survey.hosts.values()})
    return to_findings("compiler", list(survey.hosts), verdicts, ", ".join(texts))


def processors(survey: Survey) -> list[Finding]:
    """Checks that processors are of one kind, unless engines run on GPUs."""
    config = survey.resolved
    values = {host: facts.processor for host, facts in survey.hosts.items() if facts.processor}
    if not values or (config is not None and config.model.device == "cuda"):
        return []
    return to_findings("processors", list(values), minority(values), _one(values.values()))


def _major(compiler: str | None) -> int:
    """Returns the major version of the compiler, or 0 without one. A compiler whose version is
    unknown counts as new."""
    if compiler is None:
        return 0
    number = compiler.rpartition(" ")[2].partition(".")[0]
    return int(number) if number.isdigit() else _COMPILER_MAJOR


def _is_in(version: str, specifier: str) -> bool:
    return version == "not installed" or SpecifierSet(specifier).contains(version, prereleases=True)


def _one(values: Iterable[str]) -> str:
    """Returns the value that all share; empty without hosts."""
    return next(iter(values), "")


def cores(survey: Survey) -> list[Finding]:
    return _each(
        survey,
        "cores",
        lambda _host, facts: Verdict(_cores(facts), "2") if facts.cores < 2 else None,
        _cores,
    )


def _cores(facts: HostFacts) -> str:
    cpu = facts.cpu
    if cpu is None or cpu.quota is None or cpu.quota >= cpu.affinity:
        return str(facts.cores)
    return f"{facts.cores}: {cpu.quota_source} allows {cpu.quota:g} of {cpu.affinity}"


def memory(survey: Survey) -> list[Finding]:
    """Checks free memory. Running engines already have theirs."""
    weights = 0 if survey.engines_running else _weight_bytes(survey)

    def verdict(_host: str, facts: HostFacts) -> Verdict | None:
        if facts.memory is None or facts.memory.free_bytes >= MEMORY_FREE_BYTES + weights:
            return None
        wanted = f"{_mib(MEMORY_FREE_BYTES)} free"
        wanted += f", and {_mib(weights)} for the weights" if weights else ""
        return Verdict(_memory(facts), wanted)

    return _each(survey, "memory", verdict, _memory)


def _memory(facts: HostFacts) -> str:
    found = facts.memory
    if found is None:
        return "not reported"
    text = f"{_mib(found.free_bytes)} free"
    if found.limit_bytes is None:
        return f"{text} of {_mib(found.total_bytes)}"
    limit, total = _mib(found.limit_bytes), _mib(found.total_bytes)
    return f"{text}: {found.limit_source} allows {limit} of {total}"


def _weight_bytes(survey: Survey) -> int:
    """Returns the bytes of weights that a host holds in its own memory: 0 if GPUs hold them."""
    config = survey.config
    if config is None or config.model.load_format == "dummy":
        return 0
    on_gpu = any(facts.torch.gpus for facts in survey.hosts.values())
    if config.model.device == "cuda" or (config.model.device == "auto" and on_gpu):
        return 0
    return max(
        (
            sum(file.size_bytes for name, file in facts.files.items() if name.endswith(WEIGHTS))
            for facts in survey.hosts.values()
        ),
        default=0,
    )


def shared_memory(survey: Survey) -> list[Finding]:
    def verdict(_host: str, facts: HostFacts) -> Verdict | None:
        wanted = facts.ray.object_store_bytes if facts.ray else 0
        if facts.shm is None:
            return Verdict("/dev/shm does not exist", "a tmpfs")
        if facts.shm.total_bytes < wanted:
            have = f"/dev/shm has {_mib(facts.shm.total_bytes)}"
            return Verdict(have, f"{_mib(wanted)}, the size of Ray's object store")
        if facts.shm.free_bytes < SHM_FREE_BYTES:
            have = f"/dev/shm has {_mib(facts.shm.free_bytes)} free"
            return Verdict(have, f"{_mib(SHM_FREE_BYTES)} free")
        return None

    return _each(
        survey,
        "shared-memory",
        verdict,
        lambda facts: f"{_mib(facts.shm.free_bytes)} free" if facts.shm else "",
    )


def disk(survey: Survey) -> list[Finding]:
    def verdict(_host: str, facts: HostFacts) -> Verdict | None:
        for found in facts.disks:
            wanted = max(DISK_FREE_BYTES, int(found.total_bytes * DISK_FREE_PART))
            if found.free_bytes < wanted:
                return Verdict(
                    f"{found.path} has {_mib(found.free_bytes)} free", f"{_mib(wanted)} free"
                )
        return None

    return _each(
        survey,
        "disk",
        verdict,
        lambda facts: ", ".join(f"{d.path}: {_mib(d.free_bytes)} free" for d in facts.disks),
    )


def temporary_files(survey: Survey) -> list[Finding]:
    return _each(
        survey,
        "temporary-files",
        lambda _host, facts: Verdict(facts.tmp_error, "writable") if facts.tmp_error else None,
        lambda _facts: "can be written",
    )


def home(survey: Survey) -> list[Finding]:
    return _each(
        survey,
        "home",
        lambda _host, facts: Verdict(facts.home_error, "writable") if facts.home_error else None,
        lambda _facts: "can be written",
    )


def open_files(survey: Survey) -> list[Finding]:
    serve = survey.config.serve if survey.config else ServeConfig()
    wanted = serve.max_connections + RESERVED_FILES

    def verdict(_host: str, facts: HostFacts) -> Verdict | None:
        if 0 <= facts.open_files < wanted:
            return Verdict(
                str(facts.open_files),
                f"{wanted}: serve.max_connections={serve.max_connections} and {RESERVED_FILES}",
            )
        return None

    return _each(
        survey,
        "open-files",
        verdict,
        lambda facts: str(facts.open_files) if facts.open_files >= 0 else "unlimited",
    )


def gpu(survey: Survey) -> list[Finding]:
    """Checks the GPUs against Ray's count, which placement trusts."""

    def verdict(host: str, facts: HostFacts) -> Verdict | None:
        counted = int(survey.nodes.get(host, {}).get("GPU", 0))
        usable, seen = len(facts.torch.gpus), len(facts.gpus.gpus)
        if facts.gpus.error is not None:
            return Verdict(facts.gpus.error, "an answer from nvidia-smi")
        if usable < counted:
            return Verdict(f"torch can use {usable} GPUs, nvidia-smi lists {seen}", f"{counted}")
        if counted == 0 and max(usable, seen) > 0:
            return Verdict(f"Ray counts 0 of {max(usable, seen)} GPUs", f"{max(usable, seen)}")
        return None

    def shown(facts: HostFacts) -> str:
        if not facts.torch.gpus:
            return "no GPU: skipped"
        health = "" if facts.gpus.installed else ", without nvidia-smi: health not checked"
        return f"{len(facts.torch.gpus)} x {facts.torch.gpus[0]}{health}"

    return _each(survey, "gpu", verdict, shown)


def gpu_compiler(survey: Survey) -> list[Finding]:
    """Checks the C compiler of hosts with GPUs, where Triton compiles what launches a kernel."""

    def verdict(_host: str, facts: HostFacts) -> Verdict | None:
        if facts.torch.gpus and facts.c_compiler is None:
            return Verdict("no gcc or clang that runs", "a C compiler")
        return None

    return _each(
        survey,
        "gpu-compiler",
        verdict,
        lambda facts: facts.c_compiler or "" if facts.torch.gpus else "no GPU: skipped",
    )


def gpu_versions(survey: Survey) -> list[Finding]:
    """Checks versions on hosts that report them: `gpu` reports the other hosts."""
    drivers = {
        host: f"driver {facts.gpus.gpus[0].driver}"
        for host, facts in survey.hosts.items()
        if facts.gpus.gpus
    }
    builds = {
        host: f"torch {facts.torch.version}, CUDA {facts.torch.cuda}, NCCL {facts.torch.nccl}"
        for host, facts in survey.hosts.items()
        if facts.torch.gpus
    }
    hosts = list(drivers | builds)
    value = ", ".join(next(iter(values.values())) for values in (drivers, builds) if values)
    return (
        to_findings("gpu-versions", hosts, minority(drivers) | minority(builds), value)
        if hosts
        else []
    )


def gpu_models(survey: Survey) -> list[Finding]:
    values = {
        host: ", ".join(sorted(set(facts.torch.gpus)))
        for host, facts in survey.hosts.items()
        if facts.torch.gpus
    }
    if not values:
        return []
    return to_findings("gpu-models", list(values), minority(values), next(iter(values.values())))


def gpu_errors(survey: Survey) -> list[Finding]:
    def verdict(facts: HostFacts) -> Verdict | None:
        bad = [gpu for gpu in facts.gpus.gpus if gpu.uncorrected_errors]
        return Verdict(
            ", ".join(f"GPU {gpu.index}: {gpu.uncorrected_errors} errors" for gpu in bad),
            "0 errors",
        ) if bad else None  # fmt: skip

    return _each_with_health(survey, "gpu-errors", verdict, "0 errors that ECC did not correct")


def gpu_memory(survey: Survey) -> list[Finding]:
    """Checks free GPU memory. Skipped while engines run, because they hold it."""

    def verdict(facts: HostFacts) -> Verdict | None:
        full = [
            f"GPU {gpu.index}: {_mib(gpu.used_bytes)} of {_mib(gpu.memory_bytes)} used"
            for gpu in facts.gpus.gpus
            if gpu.used_bytes and gpu.memory_bytes
            if gpu.used_bytes > USED_GPU_PART * gpu.memory_bytes
        ]
        return Verdict(", ".join(full), f"at most {USED_GPU_PART:.0%}") if full else None

    if survey.engines_running:
        return []
    return _each_with_health(survey, "gpu-memory", verdict, "free")


def _each(
    survey: Survey,
    check: str,
    verdict: Callable[[str, HostFacts], Verdict | None],
    shown: Callable[[HostFacts], str],
) -> list[Finding]:
    """Checks each host. Values that may differ are shown for the first three hosts."""
    verdicts = {host: verdict(host, facts) for host, facts in survey.hosts.items()}
    texts = {host: shown(facts) for host, facts in survey.hosts.items()}
    value = next(iter(texts.values()), "")
    if len(set(texts.values())) > 1:
        value = "; ".join(f"{host}: {text}" for host, text in list(texts.items())[:3])
    return to_findings(check, list(survey.hosts), verdicts, value)


def _each_with_health(
    survey: Survey, check: str, verdict: Callable[[HostFacts], Verdict | None], value: str
) -> list[Finding]:
    """Checks each host whose nvidia-smi lists GPUs; empty if there is none."""
    hosts = [host for host, facts in survey.hosts.items() if facts.gpus.gpus]
    if not hosts:
        return []
    return to_findings(check, hosts, {host: verdict(survey.hosts[host]) for host in hosts}, value)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB"
