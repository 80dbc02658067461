"""What the next manager must know of an engine that leaves."""

from __future__ import annotations

import msgspec


class DrainRecord(msgspec.Struct, frozen=True):
    """Append-only: another release may read it. Times are seconds since 1970: the clocks of two
    hosts differ by little, in units of a drain."""

    name: str
    """Of this start of the engine."""
    left_at: float
    """When it was to leave, for the first time."""
    deadline: float
    """When it ends even if it has requests."""
    is_named: bool = False
    """An operator, an upgrade or the end of its host has named it: it is not kept."""
    next_version: str = ""
    """Name of the version whose weights it gets then; empty: it ends."""
