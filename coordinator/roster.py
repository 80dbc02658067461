"""The members of a cluster: a roster is an epoch and its members; every change is a pure function.

An epoch is one fixed membership. It never falls; each change of a member, however small, makes
the next one, so that a message of an older membership is recognised by its number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from swell.coordinator.channel import ChannelAddress

MAX_LEFT = 256
"""Engines that have left, of which a roster says so: more than leave between two views."""


class MemberState(enum.StrEnum):
    ACTIVE = "active"
    """Takes new requests."""
    LEAVING = "leaving"
    """Finishes what it has."""
    REPAIRING = "repairing"
    """Replaces one of its workers: keeps its requests, and computes nothing meanwhile."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One engine."""

    rank: int
    address: ChannelAddress
    state: MemberState = MemberState.ACTIVE
    max_model_len: int = 0
    """Longest prompt plus answer that it takes, in tokens."""
    vocab_size: int = 0
    incarnation: int = 0
    """A number that only this start of the engine has."""
    store: tuple[str, int] | None = None
    """Where workers of other engines can meet its own; None: it shares nothing with others."""
    num_blocks: int = 0
    """KV blocks of its cache."""
    version: str = ""
    """Of weights and limits: an answer comes from engines of one version. Empty: unknown."""
    leaves: bool = False
    """It replaces a worker, and then it is leaving."""


class Roster(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Members in the order of their ranks; no two share one."""

    epoch: int = 0
    members: tuple[Member, ...] = ()
    left: tuple[int, ...] = ()
    """Incarnations of engines that left on request, the newest `MAX_LEFT`. Who is no member any
    more, and not here, was lost: perhaps by what it computed."""

    @property
    def ranks(self) -> list[int]:
        return [member.rank for member in self.members]

    @cached_property
    def _by_rank(self) -> dict[int, Member]:
        return {member.rank: member for member in self.members}

    @property
    def leaving(self) -> list[int]:
        """Ranks of engines that finish what they have."""
        return [member.rank for member in self.members if member.state is MemberState.LEAVING]

    @property
    def repairing(self) -> list[int]:
        """Ranks of engines that replace a worker."""
        return [member.rank for member in self.members if member.state is MemberState.REPAIRING]

    def find(self, rank: int, incarnation: int | None = None) -> Member | None:
        """The member of this rank, if it is there (and is of this incarnation)."""
        member = self._by_rank.get(rank)
        if member is not None and incarnation in (None, member.incarnation):
            return member
        return None


def of(epoch: int, members: Iterable[Member]) -> Roster:
    """Members in any order."""
    return Roster(epoch, tuple(sorted(members, key=lambda m: m.rank)))


def join(roster: Roster, newcomers: Iterable[Member]) -> Roster:
    """Add engines that are ready to serve. A rank that is taken is a ValueError."""
    members = {member.rank: member for member in roster.members}
    for member in newcomers:
        if member.rank in members:
            raise ValueError(f"rank {member.rank} is already in epoch {roster.epoch}")
        members[member.rank] = member
    return _next(roster, members.values())


def leave(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Mark engines as leaving: they get no new requests. Those that replace a worker are leaving
    when they have done so. Unknown ranks are ignored."""
    chosen, repairing = set(ranks), set(roster.repairing)
    roster = update_members(roster, chosen & repairing, leaves=True)
    return update_members(roster, chosen - repairing, state=MemberState.LEAVING)


def cancel_leave(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Engines that were leaving are active again; others are as they were."""
    chosen = set(ranks)
    roster = update_members(roster, chosen.intersection(roster.repairing), leaves=False)
    return update_members(roster, chosen.intersection(roster.leaving), state=MemberState.ACTIVE)


def end_repair(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Those of these engines that have replaced a worker serve again, or are leaving again."""
    repaired = set(ranks).intersection(roster.repairing)
    leaves = {member.rank for member in roster.members if member.leaves}
    roster = update_members(roster, repaired - leaves, state=MemberState.ACTIVE)
    return update_members(roster, repaired & leaves, state=MemberState.LEAVING, leaves=False)


def update_members(roster: Roster, ranks: Iterable[int], **changes: Any) -> Roster:
    """Change fields of members. Unknown ranks are ignored."""
    chosen = set(ranks)
    return _next(
        roster,
        (msgspec.structs.replace(m, **changes) if m.rank in chosen else m for m in roster.members),
    )


def detach(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Take engines out that leave on request. Unknown ranks are ignored."""
    chosen = set(ranks)
    left = (m.incarnation for m in roster.members if m.rank in chosen)
    return _next(roster, (m for m in roster.members if m.rank not in chosen), left)


def remove(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Take engines out that were lost. Unknown ranks are ignored."""
    gone = set(ranks)
    return _next(roster, (m for m in roster.members if m.rank not in gone))


def _next(roster: Roster, members: Iterable[Member], left: Iterable[int] = ()) -> Roster:
    """The same members make the same epoch. Who has left and comes back has not left."""
    following = of(roster.epoch + 1, members)
    if following.members == roster.members:
        return roster
    present = {member.incarnation for member in following.members}
    gone = [incarnation for incarnation in (*roster.left, *left) if incarnation not in present]
    return msgspec.structs.replace(following, left=tuple(gone[-MAX_LEFT:]))
