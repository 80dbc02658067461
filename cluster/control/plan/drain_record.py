"""The part of a checkpoint that the next manager needs for a leaving engine."""

from __future__ import annotations

import msgspec


class DrainRecord(msgspec.Struct, frozen=True):
    """One drain. Append-only: another release may read it. Times are seconds since 1970: the clocks
    of two hosts differ by little compared with a drain."""

    name: str
    """The name of this start of the engine."""
    left_at: float
    """When the engine was first told to leave."""
    deadline: float
    """When the engine is detached even if it has requests."""
    is_named: bool = False
    """The engine was selected by an operator, an upgrade or the loss of its host: it is not
    kept."""
    next_version: str = ""
    """Name of the version whose weights the engine gets afterwards; empty: it stops."""
    unmarked_s: float = 0.0
    """How long it has once it gets no more requests, in seconds; 0: `deadline` says when it ends,
    since the coordinator knows that it leaves."""
