"""Collects the GPUs of this host from `nvidia-smi`, which asks NVML."""

from __future__ import annotations

import shutil
import subprocess

from swell.cluster.cli.doctor.facts import Gpu, GpuFacts

_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
)
_MIB = 2**20


def collect_gpus(timeout_s: float, program: str = "nvidia-smi") -> GpuFacts:
    """Run `nvidia-smi`. A healthy driver answers within some seconds, even if it must be loaded."""
    path = shutil.which(program)
    if path is None:
        return GpuFacts()
    command = [path, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
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
        return GpuFacts(installed=True, gpus=parse(done.stdout))
    except ValueError as error:
        return GpuFacts(installed=True, error=str(error))


def parse(text: str) -> tuple[Gpu, ...]:
    """Parse the rows of a query for `_FIELDS`. Raises ValueError."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) or not cells[0].isdigit():
            raise ValueError(f"nvidia-smi printed {line[:200]!r}, not {', '.join(_FIELDS)}")
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
