"""Engines of one roster to which an ingress may send a request. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cached_property

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.hash_ring import HashRing
from swell.coordinator.roster import Member, MemberState, Roster


class Role(enum.Enum):
    """What an engine does for a request, where engines compute prompts for others."""

    PREFILL = enum.auto()
    """It computes the prompt, and hands its KV over."""
    DECODE = enum.auto()
    """It continues, or does both."""


class Candidates:
    """Ranks among which one is chosen."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.ranks = list(ranks)
        self.as_set = frozenset(self.ranks)
        self._of_role: dict[Role, Candidates] = {}

    def of_role(self, role: Role, prefill_engines: int) -> Candidates:
        """Those that may have this role, where the first so many engines compute prompts; perhaps
        none."""
        if role not in self._of_role:
            prefills = role is Role.PREFILL
            ranks = (rank for rank in self.ranks if (rank < prefill_engines) is prefills)
            self._of_role[role] = Candidates(ranks)
        return self._of_role[role]

    @cached_property
    def ring(self) -> HashRing:
        """Made when it is needed: where they are few, it is not."""
        return HashRing(self.ranks)


_NONE = Candidates()


class RoutableEngines:
    """The active engines that are reached. Answers that have begun continue on their own version:
    where all its engines leave, on those."""

    def __init__(self, roster: Roster, unreachable: frozenset[EngineId]) -> None:
        reached = [m for m in roster.members if EngineId.of(m) not in unreachable]
        self.active = Candidates(m.rank for m in reached if m.state is MemberState.ACTIVE)
        self._by_version: dict[str, Candidates] = {}
        self._max_model_len: dict[str, int] = {}
        """Of versions that have an active engine."""
        for version in dict.fromkeys(member.version for member in reached):
            ranks, limit = _ranks([m for m in reached if m.version == version])
            is_all = ranks == self.active.ranks
            self._by_version[version] = self.active if is_all else Candidates(ranks)
            if limit is not None:
                self._max_model_len[version] = limit

    def of_version(self, version: str) -> Candidates:
        """Of engines that may continue an answer of this version; perhaps none."""
        return self._by_version.get(version, _NONE)

    def long_enough(self, num_tokens: int) -> Candidates:
        """Of active engines: those of the version with the greatest length, if another one does not
        take a request of so many tokens."""
        limits = self._max_model_len
        if len(limits) < 2 or min(limits.values()) >= num_tokens:
            return self.active
        return self._by_version[max(limits, key=lambda version: limits[version])]


def _ranks(members: list[Member]) -> tuple[list[int], int | None]:
    """Of those that may continue answers, and the length that active ones take; None: none is."""
    active = [member for member in members if member.state is MemberState.ACTIVE]
    leaving = [member.rank for member in members if member.state is MemberState.LEAVING]
    if not active:
        return leaving, None
    return [member.rank for member in active], min(member.max_model_len for member in active)
