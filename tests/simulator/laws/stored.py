"""Laws about the state that managers store for their successors: each one begins with what the one
before it has left, and a change that is given up leaves the version before it. What could not be
stored is not lost as long as the coordinator has it, or an engine that introduces itself to the
next coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.versions import UpgradeRecord, UpgradeStage
from swell.coordinator.manager_state import DesiredState, ManagerState
from swell.coordinator.wire import EngineHello
from tests.simulator.actors import SimCoordinator
from tests.simulator.control_plane import ControlPlane

_CHECKPOINT = b":note-"
"""Part of the keys under which managers store their state."""
_KEPT = ("target", "pause_requested", "sleep", "served", "adapters")
"""The fields of the desired state with which a manager begins."""


class StoredWatch:
    """Checks these laws whenever a manager stores its state, or the coordinator receives it."""

    def __init__(self, plane: ControlPlane, broken: Callable[[str], None]) -> None:
        self._plane, self._break = plane, broken
        self._term = 0
        """The term of the manager that took over last."""
        self._written: ClusterCheckpoint | None = None
        """The newest stored state of this manager; None: it has stored nothing yet."""
        self._left = [ClusterCheckpoint()]
        """The states that this manager may have found: the one that was stored when it took
        over, and late ones of earlier managers, which it may have missed."""
        self._claimed_at: dict[int, float] = {}
        """When the manager of each term claimed it."""
        self._stored_terms: set[int] = set()
        """The terms whose manager has stored a state."""
        self._kept_at: dict[SimCoordinator, float] = {}
        """When each coordinator received the state that it has."""
        plane.ray.on_put.append(self._on_put)
        plane.on_kept.append(self._on_kept)
        plane.on_hello.append(self._on_hello)

    def _on_put(self, key: bytes, value: bytes) -> None:
        if _CHECKPOINT not in key:
            return
        stored = msgspec.msgpack.decode(value, type=ClusterCheckpoint)
        term = stored.desired.term
        self._claimed_at.setdefault(term, self._plane.kernel.now)
        if not stored.is_claim:
            self._stored_terms.add(term)
        if term > self._term:
            if self._written is not None:
                self._left = [self._written]
            self._term, self._written = term, None
        elif term < self._term:
            self._left.append(stored)
        elif self._written is not None:
            self._report([*_mistaken(self._written.upgrade, stored.upgrade)])
            self._written = stored
        else:
            found = [[*_lost(left, stored)] for left in self._left]
            self._report(min(found, key=len))
            self._written = stored

    def _on_kept(
        self, coordinator: SimCoordinator, before: ManagerState, after: ManagerState
    ) -> None:
        """Checks that a manager begins with the state that the coordinator had when the manager
        took over. The state of a manager in between is newer if it is stored, even if it did not
        reach this coordinator."""
        kept, first = before.desired, after.desired
        if first.age == kept.age:
            return
        kept_at, claimed_at = self._kept_at.get(coordinator), self._claimed_at.get(first.term, 0.0)
        self._kept_at[coordinator] = self._plane.kernel.now
        between = range(kept.term + 1, first.term)
        if not self._stored_terms.isdisjoint(between):
            return
        if first.term > kept.term and kept_at is not None and kept_at < claimed_at:
            if first.number <= kept.number:
                self._break(f"the manager of term {first.term} ignores what the coordinator keeps")
            elif first.number == kept.number + 1:
                for name in _changed(kept, first):
                    self._break(f"the manager of term {first.term} loses the {name}, which is kept")

    def _on_hello(self, coordinator: SimCoordinator, hello: EngineHello) -> None:
        """Checks that a coordinator has the newest state that engines have kept for it."""
        known = coordinator._state_machine.manager_state.desired
        if hello.manager_state.desired.age > known.age:
            self._break(f"the coordinator ignores what engine {hello.member.rank} keeps")

    def _report(self, defects: list[str]) -> None:
        for defect in defects:
            self._break(f"the manager of term {self._term} {defect}")


def _lost(left: ClusterCheckpoint, first: ClusterCheckpoint) -> Iterator[str]:
    """Yields what the first state of a manager lacks of the state that it found."""
    before, after = left.upgrade, first.upgrade
    if not before.versions:
        return
    if after.deployed == before.deployed and after != before:
        yield f"has lost the record of the upgrade: {before.wanted}, {before.phase}"
    if after.versions[-1].number < before.versions[-1].number:
        yield f"does not know the version {before.versions[-1].name}"
    if lost := {drain.name for drain in left.drains} - {drain.name for drain in first.drains}:
        yield f"has lost the drains of {sorted(lost)}"
    if first.desired.number == left.desired.number + 1:  # coordinator and engines keep none newer
        for name in _changed(left.desired, first.desired):
            yield f"has lost the {name} of the cluster"
    yield from _mistaken(before, after)


def _changed(before: DesiredState, after: DesiredState) -> list[str]:
    """Returns the fields in which a manager does not begin with the state before it."""
    return [name for name in _KEPT if getattr(before, name) != getattr(after, name)]


def _mistaken(before: UpgradeRecord, after: UpgradeRecord) -> Iterator[str]:
    """Yields why a change would be given up for a wrong version: for another one than the version
    before it, which all engines ran, although that one has served."""
    if after.stage is UpgradeStage.SETTLED or not before.versions:
        return
    right = {_before_change(before)}
    if after.counts.done > before.counts.done:  # the change has been completed meanwhile
        right.add(before.wanted)
    fallback = _before_change(after)
    if fallback not in right and right & {*after.proven}:
        yield f"gives a change up for {fallback}, and {sorted(right)} was the version before it"


def _before_change(record: UpgradeRecord) -> str:
    """Returns the version to which a change returns, or that holds without one."""
    return record.previous if record.stage is UpgradeStage.IN_PROGRESS else record.wanted
