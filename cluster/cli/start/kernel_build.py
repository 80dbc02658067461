"""Detects whether `kernels/cpu/build.py` is compiling CPU kernels on this machine: it uses a
temporary folder next to its result."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LONGEST_S = 300.0
"""Age after which a temporary folder is left over from a killed process."""


def build_note() -> str:
    """Returns a note to add to the reason of the wait; empty: no kernels are being compiled."""
    try:
        kept = os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell"
        folders = list(Path(kept).glob("kernels/*/tmp*"))
        begun = [folder.stat().st_mtime for folder in folders]
    except (OSError, RuntimeError):  # there is no home, or the build has just finished
        return ""
    is_building = any(time.time() - each < _LONGEST_S for each in begun)
    return " (kernels are compiled, once on each machine)" if is_building else ""
