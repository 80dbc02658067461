"""Reasons why a start failed or waits, in one line, from the messages of Ray and Serve.

Serve's messages about a wait are translated, because the original ones name causes that do not
apply here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STARTING = "starting the manager and the ingresses"
_NO_ROOM = re.compile(
    r"Deployment '(\w+)'.*to be scheduled.*"
    r"Resources required for each replica: (\{.*?\}), total resources available: (\{.*?\})",
    re.DOTALL,
)
_SLOW = re.compile(r"Deployment '(\w+)'.*to (?:be )?initializ", re.DOTALL)
_FAILED = "Error:"
_NAMES = {"Ingress": "ingress", "Manager": "manager", "Store": "store of responses"}


class StartupError(RuntimeError):
    """Raised if the cluster did not start; the message is the reason, in one line."""


def last_line(text: str) -> str:
    """Returns the line with the error, which is at the end of a remote traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["Ray gave no reason"])[-1]


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
