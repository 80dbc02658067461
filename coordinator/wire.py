"""The words that the coordinator understands and says: counts, never text or tokens."""

from __future__ import annotations

import msgspec

from swell.coordinator.roster import Roster


class Watch(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """An ingress wants every `ClusterView` from now on."""

    client_index: int


class EngineReport(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """An engine tells its load: on change within a deadline, else as a heartbeat."""

    rank: int
    epoch: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Tokens known but not computed."""
    kv_usage: float = 0.0
    steps: int = 0
    """Steps done since the start: progress."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those that were found."""


CoordinatorMessage = Watch | EngineReport


class ClusterView(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Everything that an ingress routes by."""

    roster: Roster
    reports: list[EngineReport] = []
    wave: int = 0
