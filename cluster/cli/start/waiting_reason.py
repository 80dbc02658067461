"""Reasons why a start waits.

Ray Serve's messages are translated, because the original ones name causes that do not apply here. A
note tells that `kernels/cpu/build.py` is compiling CPU kernels on this machine: it uses a temporary
folder next to its result.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from swell.cluster.cli.start.startup_error import last_line

STARTING = "starting the manager and the ingresses"
_NO_ROOM = re.compile(
    r"Deployment '(\w+)'.*to be scheduled.*"
    r"Resources required for each replica: (\{.*?\}), total resources available: (\{.*?\})",
    re.DOTALL,
)
_SLOW = re.compile(r"Deployment '(\w+)'.*to (?:be )?initializ", re.DOTALL)
_FAILED = "Error:"
_NAMES = {"Ingress": "ingress", "Manager": "manager", "Store": "store of responses"}
_LONGEST_BUILD_S = 300.0
"""Age after which a temporary folder is left over from a killed process."""


def waiting_reason(messages: Iterable[str]) -> str:
    """Returns the reason of the wait, from the messages of the deployments."""
    reasons = [reason for text in messages if text and (reason := _reason(text))]
    return reasons[-1] if reasons else STARTING


def _reason(text: str) -> str | None:
    if found := _NO_ROOM.search(text):
        name = _NAMES.get(found[1], found[1])
        return f"no host has room for the {name}: it needs {found[2]}, but {found[3]} is free"
    if found := _SLOW.search(text):
        return f"the process of the {_NAMES.get(found[1], found[1])} is being started"
    if _FAILED in text:
        return f"a process did not start and is tried again: {last_line(text)}"
    return None


def build_note() -> str:
    """Returns a note to add to the reason of the wait; empty: no kernels are being compiled."""
    try:
        kept = os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell"
        folders = list(Path(kept).glob("kernels/*/tmp*"))
        begun = [folder.stat().st_mtime for folder in folders]
    except (OSError, RuntimeError):  # there is no home, or the build has just finished
        return ""
    is_building = any(time.time() - each < _LONGEST_BUILD_S for each in begun)
    return " (kernels are compiled, once on each machine)" if is_building else ""
