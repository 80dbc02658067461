"""Engines of one roster to which an ingress may send a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.hash_ring import HashRing
from swell.coordinator.roster import Member, MemberState, Roster


class Candidates:
    """Ranks among which one is chosen."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.ranks = list(ranks)
        self.as_set = frozenset(self.ranks)

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
