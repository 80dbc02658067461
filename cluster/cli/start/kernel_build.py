"""Whether the kernels for CPUs are being compiled on this machine, as `kernels/cpu/build.py` does
it: in a temporary folder beside the place where the result will be."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LONGEST_S = 300.0
"""A folder that is older was left by a process that was killed."""


def build_note() -> str:
    """To be added to what the start waits for; empty: none are compiled."""
    try:
        kept = os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell"
        folders = list(Path(kept).glob("kernels/*/tmp*"))
        begun = [folder.stat().st_mtime for folder in folders]
    except (OSError, RuntimeError):  # no home, or it has just ended
        return ""
    is_building = any(time.time() - each < _LONGEST_S for each in begun)
    return " (kernels are compiled, once on each machine)" if is_building else ""
