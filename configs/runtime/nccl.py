"""Checks that the NCCL package that torch needs is installed, before torch is imported."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from swell.configs.schema import Config, ConfigError

PACKAGES = {"nvidia-nccl-cu12": "cuda12", "nvidia-nccl-cu13": "cuda13"}
"""Package -> the extra of Swell that installs it. Both write the same library file."""
_LIBRARY = "libnccl.so.2"
_LOWER_BOUNDS = ("==", ">=", "~=")


def check_nccl(config: Config) -> None:
    """Raises ConfigError if workers of this host will form groups on GPUs, and the NCCL of their
    torch is missing, too old or of another CUDA version."""
    groups = config.parallel.world > 1 or config.parallel.expert
    if not groups or config.model.device == "cpu" or not has_gpu():
        return
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return  # the import of torch reports it
    installed = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    refusal = nccl_refusal(required, installed, is_in_system=_is_in_system())
    if refusal is not None:
        raise ConfigError(refusal)


def nccl_refusal(
    required: Sequence[str], installed: Mapping[str, str], *, is_in_system: bool = False
) -> str | None:
    """Returns why groups on GPUs cannot use the installed NCCL, with a fix; None: they can.

    `required`: the requirements of torch. A build that names no NCCL, as most that are not from
    PyPI, has its own. `installed`: package -> version. `is_in_system`: whether the system has the
    library without a package. A newer NCCL than the required one is compatible.
    """
    for text in required:
        needed = Requirement(text)
        if needed.name not in PACKAGES or not (needed.marker is None or needed.marker.evaluate()):
            continue
        wanted = f"{needed.name}{needed.specifier}"
        fix = f"pip install 'swell[{PACKAGES[needed.name]}]' '{wanted}'"
        if others := installed.keys() - {needed.name}:
            other = min(others)
            return (
                f"{other} {installed[other]} is installed, but torch needs {needed.name}, and both "
                f"write the same library; run pip uninstall -y {other}, then "
                f"pip install --force-reinstall --no-deps '{wanted}'"
            )
        found = installed.get(needed.name)
        if found is None and not is_in_system:
            return f"torch needs {wanted} for groups on GPUs, and it is not installed; run {fix}"
        if found is not None and any(
            Version(found) < Version(bound.version)
            for bound in needed.specifier
            if bound.operator in _LOWER_BOUNDS and not bound.version.endswith(".*")
        ):
            return f"{needed.name} {found} is older than torch needs; run {fix}"
    return None


def has_gpu() -> bool:
    """Whether the driver shows a GPU to this process."""
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*"))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_in_system() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True
