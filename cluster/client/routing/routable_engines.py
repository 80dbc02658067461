"""Engines of one roster to which an ingress may send a request, and the few of them that all
ingresses consider for a conversation. Pure."""

from __future__ import annotations

import enum
import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property

from swell.cluster.client.engine_connection import EngineId
from swell.coordinator.roster import Member, MemberState, Roster

_DIGEST_BYTES = 8


class HashRing:
    """Consistent hashing: ranks of engines on a ring, each at the place of its hash.

    An engine that joins or leaves changes one of the ranks chosen for a key, and only for keys near
    its place on the ring.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        points = sorted((_place(rank.to_bytes(4, "little")), rank) for rank in ranks)
        self._places = [place for place, _ in points]
        self._ranks = [rank for _, rank in points]

    def neighbours(self, key: bytes, count: int) -> list[int]:
        """Returns up to `count` ranks that follow the place of a key on the ring."""
        start = bisect_left(self._places, _place(key))
        chosen = self._ranks[start : start + count]
        return chosen + self._ranks[: min(start, count - len(chosen))]


def _place(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()


class Role(enum.Enum):
    """The role of an engine for a request, if some engines compute prompts for others."""

    PREFILL = enum.auto()
    """Computes the prompt, and hands its KV over."""
    DECODE = enum.auto()
    """Continues the request, or computes all of it."""


class Candidates:
    """Ranks among which a choice is made."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.ranks = list(ranks)
        self.as_set = frozenset(self.ranks)
        self._of_role: dict[Role, Candidates] = {}
        self._of_class: dict[str, Candidates] = {}

    def of_role(self, role: Role, prefill_engines: int) -> Candidates:
        """Returns the ranks that may have this role, possibly none. The first `prefill_engines`
        ranks compute prompts."""
        if role not in self._of_role:
            prefills = role is Role.PREFILL
            ranks = (rank for rank in self.ranks if (rank < prefill_engines) is prefills)
            self._of_role[role] = Candidates(ranks)
        return self._of_role[role]

    def of_class(self, numerics: str, classes: Mapping[int, str]) -> Candidates:
        """Returns the ranks of this numerics class, possibly none. `classes`: the class of each
        rank."""
        if numerics not in self._of_class:
            ranks = [rank for rank in self.ranks if classes[rank] == numerics]
            self._of_class[numerics] = self if ranks == self.ranks else Candidates(ranks)
        return self._of_class[numerics]

    @cached_property
    def ring(self) -> HashRing:
        """The hash ring of the ranks, built on first use: a choice among few engines needs none."""
        return HashRing(self.ranks)


_NONE = Candidates()


class RoutableEngines:
    """The active engines that this ingress reaches. An answer that has begun continues on its own
    version. If all engines of that version are leaving, it continues on those."""

    def __init__(self, roster: Roster, unreachable: frozenset[EngineId]) -> None:
        reached = [m for m in roster.members if EngineId.of(m) not in unreachable]
        self.active = Candidates(m.rank for m in reached if m.state is MemberState.ACTIVE)
        self._classes = {member.rank: member.numerics for member in reached}
        self._by_version: dict[str, Candidates] = {}
        self._max_model_len: dict[str, int] = {}
        """The maximum length of each version that has an active engine."""
        for version in dict.fromkeys(member.version for member in reached):
            ranks, limit = _ranks([m for m in reached if m.version == version])
            is_all = ranks == self.active.ranks
            self._by_version[version] = self.active if is_all else Candidates(ranks)
            if limit is not None:
                self._max_model_len[version] = limit

    def of_version(self, version: str) -> Candidates:
        """Returns the engines that may continue an answer with this version, possibly none."""
        return self._by_version.get(version, _NONE)

    def alike(self, candidates: Candidates, numerics: str) -> Candidates:
        """Returns those of these engines that have this numerics class, possibly none."""
        return candidates.of_class(numerics, self._classes)

    def long_enough(self, num_tokens: int) -> Candidates:
        """Returns the active engines; only those of the version with the greatest maximum length,
        if another version does not accept a request of `num_tokens` tokens."""
        limits = self._max_model_len
        if len(limits) < 2 or min(limits.values()) >= num_tokens:
            return self.active
        return self._by_version[max(limits, key=lambda version: limits[version])]


def _ranks(members: list[Member]) -> tuple[list[int], int | None]:
    """Returns the ranks that may continue answers, and the maximum length of the active ones; None
    if none is active."""
    active = [member for member in members if member.state is MemberState.ACTIVE]
    leaving = [member.rank for member in members if member.state is MemberState.LEAVING]
    if not active:
        return leaving, None
    return [member.rank for member in active], min(member.max_model_len for member in active)
