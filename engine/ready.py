"""What an engine's actor answers when the engine can serve, or cannot change its weights."""

from __future__ import annotations

import msgspec

from swell.coordinator.channel import ChannelAddress
from swell.engine.executor import ExecutorLimits, WorkerInfo


class EngineReady(msgspec.Struct, frozen=True):
    """An engine that can serve."""

    rank: int
    address: ChannelAddress
    limits: ExecutorLimits
    pid: int
    node: str
    workers: list[WorkerInfo]
    incarnation: int = 0
    """A number that only this start of the engine has."""
    store: tuple[str, int] | None = None
    """Where workers of other engines can meet its own."""
    version: str = ""
    """What it runs, as the roster lists it."""


class NewWeightsRefused(ValueError):
    """Weights that cannot take the place of an engine's: it serves with its own."""
