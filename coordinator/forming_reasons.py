"""Error texts for engines that prevent a group from forming: which engine, on which host, and why.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swell.coordinator.roster import Member


def not_followed(rank: int, member: Member | None, epoch: int, waited_s: float) -> str:
    """Describes an engine that hangs in an older group."""
    name = f"engine {rank}" if member is None else named(member)
    return f"{name} did not join the group of epoch {epoch} in {waited_s:.1f} s"


def not_formed(newcomer: Member, waited_s: float, peers: Sequence[Member], said: str) -> str:
    """Describes a newcomer whose join is cancelled. `peers`: engines that it did not reach, or that
    did not reach it. `said`: the last reason that an engine reported for a failed group, or
    empty."""
    said = said or "no engine reported a reason"
    names = " and ".join(map(named, peers))
    why = f"no connection with {names} ({said})" if peers else said
    return f"no group formed with {named(newcomer)} in {waited_s:.1f} s: {why}"


def not_joined(rank: int, timeout_s: float, is_alive: bool) -> str:
    """Describes a newcomer that has no group after `timeout_s` seconds, for an unknown reason."""
    if is_alive:
        return f"engine {rank} did not join the group within {timeout_s:g} s"
    return f"engine {rank} died while it joined the group"


def named(member: Member) -> str:
    """Returns the rank of an engine with the host and port that its peers use."""
    host = member.address.tcp.removeprefix("tcp://") or "an unknown address"
    return f"engine {member.rank} at {host}"
