"""The machine and the software of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_VECTORS = ("avx2", "avx512f", "amx_tile", "asimd", "sve")
_PACKAGES = ("torch", "ray", "transformers")


def machine() -> dict[str, str]:
    """Returns the processor and its features."""
    text = _read("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", text)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return {
        "processor": model[1].strip() if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "vectors": " ".join(name for name in _VECTORS if name in known),
        "last cache": _read("/sys/devices/system/cpu/cpu0/cache/index3/size").strip(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and the main dependencies."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def version_in(interpreter: str, package: str) -> str:
    """Returns the version of a distribution in another interpreter; empty if it is not installed
    there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    run = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def today() -> str:
    return datetime.date.today().isoformat()


def commit() -> str:
    """Returns the commit of the checkout, with a `+` if there are changes; empty outside of a
    checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
