"""`swell doctor`: what a machine needs before it can serve, each with its remedy."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from swell.cluster.cli.console import plain
from swell.cluster.control.http_port import listening_host
from swell.cluster.text.model_folder import check
from swell.configs.schema import Config, ConfigError, load

_SHM_BYTES = 256 * 2**20
"""Containers often have 64 MiB, which is less than Ray's object store wants."""
_COMPILER_MAJOR = 12
_TORCH_PROBE = """
import torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(torch.__version__, "on", ", ".join(names) or "cpu")
"""


class Finding(NamedTuple):
    """`level` is ok, warn (it works, but worse) or fail."""

    name: str
    level: str
    detail: str
    remedy: str = ""


def doctor(args: argparse.Namespace) -> int:
    """Print every check; 1 if one fails."""
    failed = 0
    for finding in findings(args.config, dict(args.set)):
        print(f"{finding.level:4}  {finding.name:14} {plain(finding.detail)}", flush=True)
        if finding.level != "ok" and finding.remedy:
            print(f"      {'':14} -> {finding.remedy}", flush=True)
        failed += finding.level == "fail"
    print(f"{failed} checks failed" if failed else "this machine can serve")
    return 1 if failed else 0


def findings(source: str | None, overrides: dict[str, object]) -> Iterator[Finding]:
    """Every check in turn; without a configuration only what concerns the machine."""
    yield Finding("python", "ok", platform.python_version())
    yield _torch()
    yield _ray()
    yield _compiler()
    yield _shared_memory()
    yield _cores()
    if source is None:
        yield _port("127.0.0.1", 8000)
        return
    try:
        config = load(source, overrides)
    except ConfigError as error:
        yield Finding("configuration", "fail", str(error), "correct the key that is named")
        return
    yield Finding("configuration", "ok", source)
    yield _model(config)
    try:
        host = listening_host(config, "0.0.0.0")
    except ValueError as error:
        yield Finding("interface", "fail", str(error), "correct cluster.interface")
        return
    yield _port(host, config.serve.port)


def _torch() -> Finding:
    """In a process of its own: this one needs no tensors, and a broken torch may crash."""
    remedy = "pip install 'torch>=2.11,<2.14'"
    probe = subprocess.run(
        [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, check=False
    )
    if probe.returncode == 0:
        return Finding("torch", "ok", probe.stdout.strip())
    lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    return Finding("torch", "fail", lines[-1], remedy)


def _ray() -> Finding:
    remedy = "pip install 'ray[serve]>=2.60,<3' (swell generate works without)"
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Finding("ray", "fail", "not installed", remedy)
    major, minor = (int(part) for part in version.split(".")[:2])
    level = "ok" if (2, 60) <= (major, minor) < (3, 0) else "fail"
    return Finding("ray", level, version, remedy)


def _compiler() -> Finding:
    remedy = f"install g++ {_COMPILER_MAJOR} or later: CPU attention is several times faster"
    names = (os.environ.get("CXX"), "g++", "c++")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Finding("compiler", "warn", "no g++ on the PATH", remedy)
    reported = subprocess.run(
        [found, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False
    )
    version = reported.stdout.strip()
    if reported.returncode or not version:
        return Finding("compiler", "warn", f"{found} does not run", remedy)
    major = version.split(".")[0]
    old = major.isdigit() and int(major) < _COMPILER_MAJOR
    return Finding("compiler", "warn" if old else "ok", f"{found} {version}", remedy)


def _shared_memory() -> Finding:
    try:
        size = os.statvfs("/dev/shm")
    except OSError:
        return Finding("shared memory", "warn", "/dev/shm does not exist", "mount a tmpfs there")
    free_bytes = size.f_bavail * size.f_frsize
    level = "ok" if free_bytes >= _SHM_BYTES else "warn"
    return Finding(
        "shared memory",
        level,
        f"/dev/shm has {free_bytes / 2**20:.0f} MiB free",
        f"give it {_SHM_BYTES // 2**20} MiB or more (docker run --shm-size=1g)",
    )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    return Finding("cores", "ok" if count > 1 else "warn", str(count), "2 or more serve smoothly")


def _model(config: Config) -> Finding:
    try:
        check(config)
    except ConfigError as error:
        return Finding("model", "fail", str(error), "see the message")
    return Finding("model", "ok", config.model.path)


def _port(host: str, port: int) -> Finding:
    from swell.coordinator.ports import port_is_free

    where = f"{host}:{port}"
    if port == 0 or port_is_free(host, port):
        return Finding("port", "ok", where if port else "a free one will be taken")
    remedy = "stop what listens there, or choose another with --port"
    return Finding("port", "fail", f"{where} cannot be listened on", remedy)
