"""What is reported of engines in the way of a group: which engine, at which host, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swell.coordinator.roster import Member


def not_followed(rank: int, member: Member | None, epoch: int, waited_s: float) -> str:
    """An engine that hangs in its older group, or in one of its own."""
    name = f"engine {rank}" if member is None else named(member)
    return f"{name} did not follow to the group of epoch {epoch} in {waited_s:.1f} s"


def not_formed(newcomer: Member, waited_s: float, peers: Sequence[Member], said: str) -> str:
    """A newcomer that is called off. `peers`: engines that it did not reach, or that did not reach
    it; `said`: what an engine reported last of a group that broke while it formed, or empty."""
    said = said or "no engine reported why"
    names = " and ".join(map(named, peers))
    why = f"no connection with {names} ({said})" if peers else said
    return f"no group formed with {named(newcomer)} in {waited_s:.1f} s: {why}"


def not_joined(rank: int, timeout_s: float, is_alive: bool) -> str:
    """A newcomer without a group, of which nothing else is known after `timeout_s` seconds."""
    if is_alive:
        return f"engine {rank} did not join the group within {timeout_s:g} s"
    return f"engine {rank} died while it joined the group"


def named(member: Member) -> str:
    """Its rank, and host and port as its peers reach it."""
    host = member.address.tcp.removeprefix("tcp://") or "an unknown address"
    return f"engine {member.rank} at {host}"
