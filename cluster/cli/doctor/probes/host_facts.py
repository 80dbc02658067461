"""Collects the facts of the host on which this runs. No checks; every wait has a timeout.

Files are compared by size and digest. This is fast even for large files: of weights only the header
is read, which lists the name, type, shape and offset of every tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import swell.configs as configs_package
from swell.cluster.cli.doctor.facts import (
    CpuFacts,
    DiskFacts,
    FileFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    HostRequest,
    MemoryFacts,
    RayFacts,
    StartFacts,
    TorchFacts,
)
from swell.cluster.cli.start.private_home import home_problem, write_problem
from swell.cluster.control.ray.http_port import claim_port, listening_host
from swell.cluster.port_claim import PortClaims
from swell.cluster.text.model_check import check
from swell.configs.files.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from swell.configs.files.gguf.header import part_paths
from swell.configs.files.model_path import GGUF
from swell.configs.runtime.cgroups import cpu_quota, memory_limit
from swell.configs.runtime.network import addresses, host_address
from swell.configs.runtime.process import available_cores, available_memory_bytes
from swell.configs.runtime.secret import SecretBytes
from swell.configs.schema import SERVE_FILES, Config, ConfigError

_TORCH_PART, _SMI_PART, _COMPILER_PART = 0.5, 0.25, 0.1
"""Shares of the host's time limit: if one of these programs hangs, the host still sends its other
facts."""
_TORCH_PROBE = """
import json, torch
from torch.cuda import nccl
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, nccl.version())) if torch.version.cuda else None,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cuda else [],
}))
"""
_GPU_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
)
_FEATURES = (
    *("fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
"""Instructions that change how sums are computed."""
_MIB = 2**20
_FLOORS = ("cluster", "configs", "coordinator", "engine", "kernels", "worker")
_CODE = (".py", ".cpp", ".h")
_WEIGHTS = ".safetensors"
_READ_BYTES = 64 * 2**20
"""Maximum number of bytes read of a file: tokenizers of large vocabularies have 40 MiB."""
_MOST_FILES = 2000
"""Maximum number of files of a model folder; checkpoints have some hundred."""
_DIGEST_BYTES = 8


def collect(request: HostRequest, ray: RayFacts | None = None) -> HostFacts:
    """Collects all facts. `ray`: settings of this host's Ray, if it has one."""
    config = request.config
    start = collect_start_facts(config, request.node)
    return HostFacts(
        **msgspec.structs.asdict(start),
        swell_digest=source_digest(),
        python=platform.python_version(),
        libraries={name: _version(name) for name in request.libraries},
        torch=collect_torch(request.timeout_s * _TORCH_PART),
        gpus=collect_gpus(request.timeout_s * _SMI_PART),
        compiler=find_compiler(request.timeout_s * _COMPILER_PART),
        c_compiler=find_c_compiler(request.timeout_s * _COMPILER_PART),
        cores=available_cores(),
        cpu=_cpu(),
        memory=_memory(),
        processor=processor(),
        home_error=home_problem(),
        tmp_error=write_problem(Path("/tmp")),
        shm=_disk(Path("/dev/shm")),
        disks=tuple(_disks(config, ray)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        model_error=_model_error(config) if config else None,
        files=config_files(config, request.salt) if config else {},
        ray=ray,
    )


def collect_start_facts(config: Config | None, node: str) -> StartFacts:
    """Collects the facts that decide whether processes of `config` can start on this host, which
    Ray knows by the address `node`."""
    interface = config.cluster.interface if config else None
    try:
        address = host_address(interface, node)
    except ValueError:
        address = None
    paths = named_paths(config) if config else {}
    return StartFacts(
        addresses=tuple(f"{name} {number}" for name, number in addresses()),
        address=address,
        http_error=_http_error(config, node) if config and address else None,
        unreadable={key: path for key, path in paths.items() if not os.access(path, os.R_OK)},
    )


def collect_torch(timeout_s: float) -> TorchFacts:
    """Collects the facts of torch in another process: this one does not need torch, and a broken
    torch may crash or hang."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"its import has not finished after {timeout_s:g} s")
    if probe.returncode == 0:
        return msgspec.json.decode(probe.stdout.strip().splitlines()[-1], type=TorchFacts)
    lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    return TorchFacts(error=lines[-1])


def collect_gpus(timeout_s: float, program: str = "nvidia-smi") -> GpuFacts:
    """Runs `nvidia-smi`, which asks NVML. A healthy driver answers within some seconds, even if it
    must be loaded."""
    path = shutil.which(program)
    if path is None:
        return GpuFacts()
    command = [path, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(installed=True, error=f"{program} did not answer within {timeout_s:g} s")
    except OSError as error:
        return GpuFacts(installed=True, error=f"{program} does not run: {error.strerror}")
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        reason = lines[0] if lines else f"exit code {done.returncode}"
        return GpuFacts(installed=True, error=f"{program}: {reason}")
    try:
        return GpuFacts(installed=True, gpus=parse_gpus(done.stdout))
    except ValueError as error:
        return GpuFacts(installed=True, error=str(error))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parses the rows of a query for `_GPU_FIELDS`. Raises ValueError."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_GPU_FIELDS) or not cells[0].isdigit():
            raise ValueError(f"nvidia-smi printed {line[:200]!r}, not {', '.join(_GPU_FIELDS)}")
        index, name, driver, memory, used, errors = cells
        memory_mib, used_mib = _number(memory), _number(used)
        found.append(
            Gpu(
                index=int(index),
                name=name,
                driver=driver,
                memory_bytes=None if memory_mib is None else memory_mib * _MIB,
                used_bytes=None if used_mib is None else used_mib * _MIB,
                uncorrected_errors=_number(errors),
            )
        )
    return tuple(found)


def _number(cell: str) -> int | None:
    """Returns a number; None for `[N/A]` and the like."""
    return int(cell) if cell.isdigit() else None


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns architecture, vendor and the instructions by which libraries choose their code."""
    values: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            values.setdefault(key.strip(), value.strip())
    vendor = values.get("vendor_id") or values.get("CPU implementer", "")
    features = (values.get("flags") or values.get("Features", "")).split()
    known = [name for name in _FEATURES if name in features]
    return " ".join(filter(None, (platform.machine(), vendor, *known)))


def find_compiler(timeout_s: float) -> str | None:
    """Returns the path and version of the C++ compiler; None: there is none that runs."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return _run_compiler(names, ["-dumpfullversion", "-dumpversion"], timeout_s)


def find_c_compiler(timeout_s: float) -> str | None:
    """Returns the path and version of the C compiler that Triton selects; None: there is none that
    runs."""
    return _run_compiler((os.environ.get("CC"), "gcc", "clang"), ["-dumpversion"], timeout_s)


def _run_compiler(
    names: Sequence[str | None], options: Sequence[str], timeout_s: float
) -> str | None:
    """Returns the path of the first compiler that is installed, and the version that it prints."""
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *options], capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = done.stdout.strip()
    return f"{found} {version}" if done.returncode == 0 and version else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> CpuFacts:
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota()
    if quota is None:
        return CpuFacts(affinity=affinity)
    return CpuFacts(affinity=affinity, quota=quota.cores, quota_source=quota.source)


def _memory() -> MemoryFacts:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, limit = available_memory_bytes(), memory_limit()
    if limit is None:
        return MemoryFacts(total_bytes=total, free_bytes=free)
    return MemoryFacts(
        total_bytes=total,
        free_bytes=free,
        limit_bytes=limit.limit_bytes,
        limit_source=limit.source,
    )


def _disks(config: Config | None, ray: RayFacts | None) -> list[DiskFacts]:
    """Returns the disks of temporary files, of Ray's session and, if the model must be downloaded,
    of the hub's cache; one for each file system."""
    session = ray.session_folder if ray else None
    paths = [_existing(Path(name)) for name in (tempfile.gettempdir(), session) if name]
    if config and model_files(config.model.path) is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        paths.append(_existing(Path(HF_HUB_CACHE)))
    by_device = {path.stat().st_dev: path for path in reversed(paths)}
    return [found for path in by_device.values() if (found := _disk(path))]


def _existing(path: Path) -> Path:
    """Returns the path, or its nearest parent folder that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _disk(path: Path) -> DiskFacts | None:
    try:
        size = os.statvfs(path)
    except OSError:
        return None
    return DiskFacts(
        path=str(path),
        total_bytes=size.f_blocks * size.f_frsize,
        free_bytes=size.f_bavail * size.f_frsize,
    )


def _http_error(config: Config, node: str) -> str | None:
    try:
        claim_port(config, node)
        PortClaims().check(listening_host(config, node), config.serve.port, _is_of_this_ray)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _is_of_this_ray(owner: str) -> bool:
    from swell.cluster.serve_status import is_of_this_ray  # imports Ray Serve

    return is_of_this_ray(owner)


def _model_error(config: Config) -> str | None:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return None


def named_paths(config: Config) -> dict[str, str]:
    """Returns the files that must be readable, by configuration key. Hub ids are left out: each
    host has its own cache."""
    serve = config.serve
    paths = {f"serve.{key}": getattr(serve, key) for key in SERVE_FILES if getattr(serve, key)}
    for name, folder in config.lora.adapters.items():
        paths[f"lora.adapters.{name}"] = str(Path(folder, WEIGHTS_NAME))
    small = config.drafts.model
    models = {"model.path": config.model.path, "drafts.model": small.path if small else ""}
    for key, path in models.items():
        if Path(path).is_absolute():
            paths[key] = path if path.endswith(GGUF) else str(Path(path, "config.json"))
    return paths


def config_files(config: Config, salt: SecretBytes) -> dict[str, FileFacts]:
    """Returns facts of the files of the model and of adapters, by name, and of files that `serve`
    names, by configuration key. Files that cannot be read are left out."""
    found: dict[str, FileFacts] = {}
    for path in sorted(model_files(config.model.path) or ())[:_MOST_FILES]:
        _add(found, path.name, path, salt)
    for adapter, adapter_folder in config.lora.adapters.items():
        for file_name in (CONFIG_NAME, WEIGHTS_NAME):
            _add(found, f"{adapter}/{file_name}", Path(adapter_folder, file_name), salt)
    for key in SERVE_FILES:
        if name := getattr(config.serve, key):
            _add(found, f"serve.{key}", Path(name), salt)
    return found


def model_files(path: str) -> list[Path] | None:
    """Returns the files of a model folder, of the cached folder of a hub id on this host, or of a
    GGUF model; None: not cached yet."""
    if path.endswith(GGUF):
        return part_paths(Path(path))
    folder = Path(path) if Path(path).is_dir() else cached_folder(path)
    return None if folder is None else list(_model_files(folder))


def cached_folder(path: str) -> Path | None:
    """Returns the cached folder of a hub id on this host; None: not cached yet."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def source_digest() -> str:
    """Returns the digest of the source files of the package `swell` that this process runs."""
    top = Path(str(configs_package.__file__)).parents[1]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(_source_files(top)):
        digest.update(path.relative_to(top).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_files(top: Path) -> Iterator[Path]:
    """Yields the source files of packages; scripts outside packages are not installed."""
    for floor in _FLOORS:
        for path in (top / floor).rglob("*"):
            if path.suffix in _CODE and (path.parent / "__init__.py").is_file():
                yield path


def _model_files(folder: Path) -> Iterator[Path]:
    """Yields the model's files, without subfolders and other formats of the same weights."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt", _WEIGHTS):
            yield path


def _add(found: dict[str, FileFacts], name: str, path: Path, salt: SecretBytes) -> None:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = _READ_BYTES
            if path.suffix == _WEIGHTS:
                length = min(length, int.from_bytes(file.read(8), "little"))
            content = file.read(length)
    except OSError:
        return
    digest = hashlib.blake2b(content, key=salt, digest_size=_DIGEST_BYTES).hexdigest()
    found[name] = FileFacts(size_bytes=size_bytes, digest=digest)
