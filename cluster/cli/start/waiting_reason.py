"""Reasons why a start waits.

Ray Serve's messages are translated, because the original ones name causes that do not apply here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
