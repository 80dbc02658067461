"""The members of a cluster: a roster is an epoch with its members. Every change is a pure function.

An epoch is one fixed membership. It never decreases, and any change of a member increments it, so
that a message from an older membership is recognized by its number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from swell.coordinator.transport.channel import ChannelAddress

MAX_LEFT = 256
"""Maximum number of engines that a roster lists as left: more than leave between two views."""


class MemberState(enum.StrEnum):
    ACTIVE = "active"
    """Accepts new requests."""
    LEAVING = "leaving"
    """Finishes its current requests."""
    REPAIRING = "repairing"
    """Replaces one of its workers: keeps its requests, but computes nothing meanwhile."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One engine."""

    rank: int
    address: ChannelAddress
    state: MemberState = MemberState.ACTIVE
    max_model_len: int = 0
    """Longest prompt plus answer that it accepts, in tokens."""
    vocab_size: int = 0
    incarnation: int = 0
    """A number that is unique to this start of the engine."""
    store: tuple[str, int] | None = None
    """Address of the TCPStore at which workers of other engines meet its workers; None: it shares
    nothing with other engines."""
    num_blocks: int = 0
    """Number of KV blocks of its cache."""
    version: str = ""
    """Version of weights and limits: one answer comes from engines of a single version. Empty:
    unknown."""
    leaves: bool = False
    """Whether it starts leaving once it has replaced its worker."""
    numerics: str = ""
    """The numerics class: engines of one class find the same bits for a request. Empty: unknown."""


class Roster(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Members in the order of their ranks, which are unique."""

    epoch: int = 0
    members: tuple[Member, ...] = ()
    left: tuple[int, ...] = ()
    """Incarnations of engines that left on request, the newest `MAX_LEFT`. A former member that is
    not in this list was lost, perhaps by a crash that its requests caused."""

    @property
    def ranks(self) -> list[int]:
        return [member.rank for member in self.members]

    @cached_property
    def _by_rank(self) -> dict[int, Member]:
        return {member.rank: member for member in self.members}

    @property
    def leaving(self) -> list[int]:
        """Ranks of engines that finish their current requests."""
        return [member.rank for member in self.members if member.state is MemberState.LEAVING]

    @property
    def repairing(self) -> list[int]:
        """Ranks of engines that replace a worker."""
        return [member.rank for member in self.members if member.state is MemberState.REPAIRING]

    def find(self, rank: int, incarnation: int | None = None) -> Member | None:
        """Returns the member of this rank (and incarnation, if specified), or None."""
        member = self._by_rank.get(rank)
        if member is not None and incarnation in (None, member.incarnation):
            return member
        return None


def of(epoch: int, members: Iterable[Member]) -> Roster:
    """Returns a roster of members in any order."""
    return Roster(epoch, tuple(sorted(members, key=lambda m: m.rank)))


def join(roster: Roster, newcomers: Iterable[Member]) -> Roster:
    """Adds engines that are ready to serve. Raises ValueError if a rank is taken."""
    members = {member.rank: member for member in roster.members}
    for member in newcomers:
        if member.rank in members:
            raise ValueError(f"rank {member.rank} is already in epoch {roster.epoch}")
        members[member.rank] = member
    return _next(roster, members.values())


def leave(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Marks engines as leaving: they get no new requests. Engines that replace a worker are marked
    once they have done so. Unknown ranks are ignored."""
    chosen, repairing = set(ranks), set(roster.repairing)
    roster = update_members(roster, chosen & repairing, leaves=True)
    return update_members(roster, chosen - repairing, state=MemberState.LEAVING)


def cancel_leave(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Makes engines that were leaving active again; others do not change."""
    chosen = set(ranks)
    roster = update_members(roster, chosen.intersection(roster.repairing), leaves=False)
    return update_members(roster, chosen.intersection(roster.leaving), state=MemberState.ACTIVE)


def end_repair(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Makes those of these engines that have replaced a worker active again, or leaving."""
    repaired = set(ranks).intersection(roster.repairing)
    leaves = {member.rank for member in roster.members if member.leaves}
    roster = update_members(roster, repaired - leaves, state=MemberState.ACTIVE)
    return update_members(roster, repaired & leaves, state=MemberState.LEAVING, leaves=False)


def update_members(roster: Roster, ranks: Iterable[int], **changes: Any) -> Roster:
    """Changes fields of members. Unknown ranks are ignored."""
    chosen = set(ranks)
    return _next(
        roster,
        (msgspec.structs.replace(m, **changes) if m.rank in chosen else m for m in roster.members),
    )


def detach(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Removes engines that leave on request. Unknown ranks are ignored."""
    chosen = set(ranks)
    left = (m.incarnation for m in roster.members if m.rank in chosen)
    return _next(roster, (m for m in roster.members if m.rank not in chosen), left)


def remove(roster: Roster, ranks: Iterable[int]) -> Roster:
    """Removes engines that were lost. Unknown ranks are ignored."""
    gone = set(ranks)
    return _next(roster, (m for m in roster.members if m.rank not in gone))


def _next(roster: Roster, members: Iterable[Member], left: Iterable[int] = ()) -> Roster:
    """Returns a roster with the next epoch, or the same roster if the members are unchanged. An
    engine that left and joined again is no longer listed in `left`."""
    following = of(roster.epoch + 1, members)
    if following.members == roster.members:
        return roster
    present = {member.incarnation for member in following.members}
    gone = [incarnation for incarnation in (*roster.left, *left) if incarnation not in present]
    return msgspec.structs.replace(following, left=tuple(gone[-MAX_LEFT:]))
