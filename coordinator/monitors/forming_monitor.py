"""Detects that a group fails to form in time, finds the engines that are the cause, and describes
them: which engine, on which host, and why. Pure.

While a group forms, its engines leave the older group, connect and move experts. Forming has failed
if nothing happens for `limit_s`: no engine joins, and none makes progress. The cause is found as
follows:

1. An engine hangs if it was told at the beginning to leave its older group and has not done so.
   It is removed.
2. Engines report which peers they did not reach. If a newcomer is in such a pair, its join is
   cancelled; of two newcomers, that of the one with more unreached pairs. If only the newcomer
   itself reports this, its peers may hang: then all engines are probed first. They are also probed
   if other newcomers than these have not followed: a peer may name a newcomer for which it waited
   only because another one hangs.
3. All engines are also probed if no engine reports an unreached peer: the group is formed again.
   A newcomer that does not follow the probe within a quarter of the limit hangs, and its join is
   cancelled. An engine that served before hangs if it does not follow within half of the limit,
   and is removed. If all engines follow, the joins of newcomers in unreached pairs are cancelled.
   If no engine reports an unreached peer, the joins of newcomers that have not joined are
   cancelled; else those of all newcomers. The others continue.
4. If all engines follow the probe, no newcomer is in an unreached pair, and the group has not
   formed within half of the limit, engines in unreached pairs are removed, as few as possible:
   while a link between two hosts is down, the others and the newcomers serve. A group without a
   newcomer in which no engine reports an unreached peer is formed again. The only engine of a group
   follows if only its message was lost.

All durations count only time in which the coordinator listened (`listening_clock.py`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from swell.coordinator.roster import Member
from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.wave_protocol.wave_interface import CoordinatorWaves, GroupState, Phase
from swell.coordinator.wire import Broken, EngineReport

_PROBE_SHARE = 0.25
"""How long a probe waits for newcomers to follow, as a share of the limit."""
_LAST_SHARE = 0.5
"""How long it waits for engines that served before: removing one of them costs more."""


class Remedy(enum.Enum):
    """Action of the coordinator if a group does not form."""

    WAIT = "wait"
    REMOVE = "remove"
    """Remove these engines, which hang or which their peers do not reach."""
    CALL_OFF = "call off"
    """Continue without these newcomers."""
    FORM_AGAIN = "form again"


@dataclass(frozen=True)
class FormingFailure:
    remedy: Remedy
    ranks: frozenset[int] = frozenset()
    """The ranks that the remedy concerns."""
    waited_s: float = 0.0
    unreached_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each of these ranks, the peers that it did not reach, or that did not reach it."""


NOTHING = FormingFailure(Remedy.WAIT)


@dataclass
class _Attempt:
    """State since these ranks began to form a group, across all of its epochs."""

    ranks: tuple[int, ...]
    first_epoch: int
    progressed_at: float
    most_joined: int = 0
    counters: tuple[int, ...] = ()
    """Progress counters of the ranks, from their newest reports."""
    probed_at: float | None = None
    probe_epoch: int = 0
    """An engine has followed the probe if it reports this epoch or a later one."""


class FormingMonitor:
    """Monitors the group that is being formed, if there is one."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._clock = ListeningClock(limit_s)
        self._clock.advance(now)
        self._reports: dict[int, EngineReport] = {}
        self._broken: dict[int, Broken] = {}
        """Rank -> its newest `Broken` with absent peers, since the forming began."""
        self._attempt: _Attempt | None = None

    def on_report(self, report: EngineReport) -> None:
        self._reports[report.rank] = report

    def on_broken(self, message: Broken) -> None:
        """Records a message. It may belong to an older epoch of the attempt: an engine that is
        aborted reports the peers for which it waited."""
        if message.absent:
            self._broken[message.rank] = message

    def check(self, waves: CoordinatorWaves, newcomers: Set[int], now: float) -> FormingFailure:
        """Returns the remedy that is due. Call it periodically, after all received messages were
        handled."""
        at = self._clock.advance(now)
        if waves.group_state is not GroupState.FORMING:
            self._attempt = None
            self._broken.clear()
            self._reports = {r: self._reports[r] for r in waves.ranks if r in self._reports}
            return NOTHING
        attempt = self._attempt
        if attempt is None or attempt.ranks != waves.ranks:
            attempt = self._attempt = _Attempt(waves.ranks, waves.epoch, at)
        counters = tuple(map(self._progress, waves.ranks))
        joined = len(waves.acknowledged)
        if joined > attempt.most_joined or counters != attempt.counters:
            attempt.most_joined = max(joined, attempt.most_joined)
            attempt.counters, attempt.progressed_at = counters, at
            attempt.probed_at = None
        if attempt.probed_at is None:
            is_over = at - attempt.progressed_at > self._limit_s
        else:
            is_over = at - attempt.probed_at > _PROBE_SHARE * self._limit_s
        return self._judge(attempt, waves, newcomers, at) if is_over else NOTHING

    def _progress(self, rank: int) -> int:
        """Returns an engine's progress counter. Progress of a standalone engine does not count for
        the group."""
        report = self._reports.get(rank)
        return (
            0
            if report is None or report.wave_phase == Phase.STANDALONE
            else report.progress_counter
        )

    def _judge(
        self, attempt: _Attempt, waves: CoordinatorWaves, newcomers: Set[int], at: float
    ) -> FormingFailure:
        waited_s = at - attempt.progressed_at
        self._attempt = None
        if behind := self._behind(waves.ranks, attempt.first_epoch):
            return FormingFailure(Remedy.REMOVE, behind, waited_s)
        late = newcomers & set(waves.ranks)
        absent = self._absent(waves)
        if attempt.probed_at is not None:
            return self._judge_probe(attempt, waves, late, absent, at)
        pairs = _unreached_pairs(absent)
        unreached = cover(pairs, late)
        hanging = self._behind(late, waves.epoch)
        is_named = unreached <= _named_by_others(absent)
        if unreached and is_named and hanging in (frozenset(), unreached):
            return _without(Remedy.CALL_OFF, unreached, pairs, waited_s)
        attempt.probed_at, attempt.probe_epoch = at, waves.epoch + 1
        self._attempt = attempt
        return FormingFailure(Remedy.FORM_AGAIN, frozenset(), waited_s)

    def _judge_probe(
        self,
        attempt: _Attempt,
        waves: CoordinatorWaves,
        late: Set[int],
        absent: Mapping[int, Set[int]],
        at: float,
    ) -> FormingFailure:
        assert attempt.probed_at is not None
        waited_s = at - attempt.progressed_at
        behind = self._behind(waves.ranks, attempt.probe_epoch)
        pairs = _unreached_pairs(absent)
        if hanging := behind & late:
            self._broken.clear()
            return _without(Remedy.CALL_OFF, hanging, pairs, waited_s)
        guilty = cover(pairs, late)
        between_others = (
            set() if guilty else _unreached_pairs(self._absent(waves, attempt.first_epoch))
        )
        if behind or not late or between_others:
            if at - attempt.probed_at <= _LAST_SHARE * self._limit_s:
                self._attempt = attempt
                return NOTHING
            if behind:
                return FormingFailure(Remedy.REMOVE, behind, waited_s)
            unreached = cover(between_others, set(waves.ranks))
            self._broken.clear()
            remedy = Remedy.REMOVE if unreached else Remedy.FORM_AGAIN
            return _without(remedy, unreached, between_others, waited_s)
        self._broken.clear()
        guilty = guilty or frozenset(late - waves.acknowledged) or frozenset(late)
        if guilty and guilty != set(waves.ranks):
            return _without(Remedy.CALL_OFF, guilty, pairs, waited_s)
        return FormingFailure(Remedy.FORM_AGAIN, frozenset(), waited_s)

    def _behind(self, ranks: Iterable[int], epoch: int) -> frozenset[int]:
        """Ranks that have not reported this epoch or a later one."""
        return frozenset(
            rank for rank in ranks if rank not in self._reports or self._reports[rank].epoch < epoch
        )

    def _absent(self, waves: CoordinatorWaves, since: int = 0) -> dict[int, frozenset[int]]:
        """Rank -> peers that it did not reach. Once one engine has joined an epoch, all have
        connected in it, so messages about older epochs are ignored; those about epochs before
        `since`, too."""
        newest = waves.epoch if waves.acknowledged else since
        return {
            rank: frozenset(message.absent).intersection(waves.ranks)
            for rank, message in self._broken.items()
            if rank in waves.ranks and message.epoch >= newest
        }


def _unreached_pairs(absent: Mapping[int, Set[int]]) -> set[frozenset[int]]:
    """Returns pairs of engines in which at least one has not reached the other."""
    return {frozenset((rank, peer)) for rank, peers in absent.items() for peer in peers - {rank}}


def _named_by_others(absent: Mapping[int, Set[int]]) -> frozenset[int]:
    """Ranks that at least one other engine did not reach."""
    return frozenset(peer for rank, peers in absent.items() for peer in peers if peer != rank)


def _without(
    remedy: Remedy, ranks: frozenset[int], pairs: Set[frozenset[int]], waited_s: float
) -> FormingFailure:
    """Returns a failure of a group that continues without these ranks."""
    peers = {
        rank: tuple(sorted({r for pair in pairs if rank in pair for r in pair} - {rank}))
        for rank in ranks
    }
    return FormingFailure(remedy, ranks, waited_s, peers)


def cover(pairs: Set[frozenset[int]], candidates: Set[int]) -> frozenset[int]:
    """Returns a greedy vertex cover: candidates such that each pair with a candidate contains a
    returned one. The candidate with the most pairs is chosen first, and of equal ones the highest
    rank."""
    left, chosen = {pair for pair in pairs if pair & candidates}, set()
    while left:
        counts = Counter(rank for pair in left for rank in pair if rank in candidates)
        chosen.add(max(counts, key=lambda rank: (counts[rank], rank)))
        left = {pair for pair in left if not pair & chosen}
    return frozenset(chosen)


def not_followed(rank: int, member: Member | None, epoch: int, waited_s: float) -> str:
    """Describes an engine that hangs in an older group."""
    name = f"engine {rank}" if member is None else named(member)
    return f"{name} did not join the group of epoch {epoch} in {waited_s:.1f} s"


def not_formed(member: Member, waited_s: float, peers: Sequence[Member], said: str) -> str:
    """Describes an engine without which the group is formed. `peers`: engines that it did not
    reach, or that did not reach it. `said`: the last reason that an engine reported for a failed
    group, or empty."""
    said = said or "no engine reported a reason"
    names = " and ".join(map(named, peers))
    why = f"no connection with {names} ({said})" if peers else said
    return f"no group formed with {named(member)} in {waited_s:.1f} s: {why}"


def not_joined(rank: int, timeout_s: float, is_alive: bool) -> str:
    """Describes a newcomer that has no group after `timeout_s` seconds, for an unknown reason."""
    if is_alive:
        return f"engine {rank} did not join the group within {timeout_s:g} s"
    return f"engine {rank} died while it joined the group"


def named(member: Member) -> str:
    """Returns the rank of an engine with the host and port that its peers use."""
    host = member.address.tcp.removeprefix("tcp://") or "an unknown address"
    return f"engine {member.rank} at {host}"
