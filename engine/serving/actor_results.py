"""Results of an engine's actor: the engine can serve, or cannot change its weights."""

from __future__ import annotations

import msgspec

from swell.coordinator.transport.channel import ChannelAddress
from swell.engine.executor import ExecutorLimits, WorkerInfo
from swell.engine.serving.start_timeline import StartPhase


class EngineReady(msgspec.Struct, frozen=True):
    """An engine that can serve."""

    rank: int
    address: ChannelAddress
    limits: ExecutorLimits
    pid: int
    node: str
    workers: tuple[WorkerInfo, ...]
    incarnation: int = 0
    """A number that is unique to this start of the engine."""
    store: tuple[str, int] | None = None
    """Address of the store at which workers of other engines meet its workers."""
    version: str = ""
    """The version that it runs, as the roster lists it."""
    start: list[StartPhase] = []
    """The phases of its start. The first one begins with the first call of its process."""


class StartStatus(msgspec.Struct, frozen=True):
    """The work of an engine that does not serve yet, for waiting people."""

    text: str
    workers: tuple[WorkerInfo, ...] = ()


class NewWeightsRefused(ValueError):
    """Raised if an engine cannot use new weights: it serves with its previous ones."""
