"""Which engines an upgrade replaces next. Pure: time is an argument.

Laws. Answers that have begun continue on engines of their version alone; ingresses see to that.
So the last engine of a version ends only when nobody needs it, and one is made again where the last
one died while an ingress still needs it. There is at most one engine more than wanted:

    extra engine starts ---> it serves ---> one of an older version leaves ---> it has gone ---+
          ^                                                                                    |
          +---------------------------------- until none is older -----------------------------+

Without room for an extra engine one of an older version leaves first, and its successor takes its
place. So it does where engines of the older version are missing and do not start again. A version
whose engine does not become ready is rolled back: from then on the one before is wanted, and
engines of the failed one are replaced in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as with_fields

from swell.cluster.control.backoff import Backoff
from swell.cluster.control.control_state import ScaleRefused
from swell.cluster.control.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.versions import MAX_VERSIONS, UpgradeRecord, UpgradeStage, Version
from swell.configs.schema import Config

_EXTRA = 0
"""The place of extra engines in the back-off."""
_MAX_NO_ROOM = 3
"""Starts in the place of an engine that has left, until the version counts as too large for it."""
_ENDS = {
    UpgradeStage.IN_PROGRESS: UpgradeStage.SETTLED,
    UpgradeStage.ROLLING_BACK: UpgradeStage.FAILED,
}
"""What the stages of a change become when all engines are of the wanted version."""
_UNDER_WAY = tuple(_ENDS)


class UpgradeRefused(ScaleRefused):
    """An upgrade that cannot be made, and why."""


@dataclass(frozen=True)
class UpgradeState:
    record: UpgradeRecord
    backoff: Backoff = field(default_factory=Backoff)
    """Of extra engines."""
    no_room: int = 0
    """Starts in a row for which there was no room, where an engine had left for them."""
    failing: str = ""
    """A version of which engines are missing and do not start, until as many serve as are wanted: a
    new one takes their places."""

    @property
    def starts(self) -> Version:
        """The version of an engine that replaces another one: the new one only once it has
        served."""
        record = self.record
        untried = record.stage is UpgradeStage.IN_PROGRESS and record.wanted not in record.proven
        is_direct = record.in_place or self.failing == record.previous
        if untried and not is_direct and record.previous in record.proven:
            return record.get(record.previous)
        return record.get(record.wanted)


@dataclass(frozen=True)
class UpgradePlan:
    """What to do now, by rank."""

    held: frozenset[int] = frozenset()
    """Engines that leave, and end only when no ingress needs their version."""
    vacating: frozenset[int] = frozenset()
    """Engines that leave, and count until they have gone: others take their places."""
    cancel: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    extra: Version | None = None
    """An engine of it starts beside those that are wanted."""
    wait_s: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why an engine did not start."""

    version: str
    reason: str
    is_extra: bool = False
    no_room: bool = False
    """Nothing was started."""
    permanent: bool = False
    """It would fail again in the same way."""


def take_over(record: UpgradeRecord, identity: str, config: Config) -> UpgradeState:
    """Go on with what the manager before has left, whose application was perhaps deployed with
    another configuration than this one: then that is an upgrade."""
    if record.find(record.wanted) is None:
        version = Version.of(1, identity, config)
        return UpgradeState(
            UpgradeRecord((version,), version.name, version.name, deployed=identity)
        )
    if identity == record.deployed:
        return UpgradeState(record)
    record = with_fields(record, deployed=identity)
    if identity == record.get(record.wanted).identity:
        return UpgradeState(record)
    if record.stage in _UNDER_WAY:  # towards a configuration that is not deployed any more
        served = record.wanted if record.wanted in record.proven else record.previous
        record = with_fields(record, wanted=served, stage=UpgradeStage.SETTLED)
        if identity == record.get(served).identity:
            return UpgradeState(record)
    return begin(UpgradeState(record), identity, config)


def begin(state: UpgradeState, identity: str, config: Config) -> UpgradeState:
    """Want another version. To want the previous one again cancels an upgrade that is under way.
    Raises UpgradeRefused."""
    record = state.record
    wanted, previous = record.get(record.wanted), record.find(record.previous)
    if identity == wanted.identity:
        raise UpgradeRefused(
            f"version {wanted.name} has this configuration already; other weights need another "
            "model.path"
        )
    if record.stage in _UNDER_WAY:
        is_cancel = previous is not None and identity == previous.identity
        if is_cancel and record.stage is UpgradeStage.IN_PROGRESS:
            return _roll_back(state, "it was cancelled")
        if record.stage is UpgradeStage.ROLLING_BACK:
            raise UpgradeRefused(
                f"version {record.previous} is rolled back to version {wanted.name}: wait until "
                "that has ended, and request the upgrade again"
            )
        raise UpgradeRefused(
            f"an upgrade to version {wanted.name} is under way ({record.stage}): wait until it has "
            "ended, or request the configuration of the version before to cancel it"
        )
    version = Version.of(record.versions[-1].number + 1, identity, config)
    versions = (*record.versions, version)
    kept = [v for v in versions[:-MAX_VERSIONS] if v.name == wanted.name]
    return UpgradeState(
        with_fields(
            record,
            versions=(*kept, *versions[-MAX_VERSIONS:]),
            wanted=version.name,
            previous=wanted.name,
            stage=UpgradeStage.IN_PROGRESS,
            in_place=False,
            error=None,
        ),
        failing=state.failing,
    )


def plan(
    state: UpgradeState, fleet: FleetView, target: int, needed: Collection[str], now: float
) -> tuple[UpgradeState, UpgradePlan]:
    """`target`: engines wanted. `needed`: names of versions by which answers have begun."""
    state = _observe(state, fleet, target)
    record = state.record
    staying, leaving = fleet.of(Place.SERVING), _leaving(fleet)
    outdated = [engine.rank for engine in staying if engine.version != record.wanted]
    surplus = len(staying) - target
    leave = tuple(outdated[-surplus:]) if surplus > 0 else ()
    wanted = {record.wanted, state.starts.name, *needed}
    done = UpgradePlan(
        held=_last_of_version(fleet, staying, leaving),
        vacating=frozenset(e.rank for e in leaving) if record.in_place else frozenset(),
        cancel=tuple(
            engine.rank
            for engine in fleet.of(Place.STARTING)
            if engine.version not in wanted and not engine.in_transition
        ),
        leave=leave,
    )
    if leave or done.cancel or fleet.num_present < target:
        return state, done
    ends = [engine for engine in fleet.engines if engine.place is Place.ENDING]
    missing = unmet(state, fleet, needed)
    if missing and not any(engine.is_present for engine in ends):  # else a successor of it is next
        return _make(state, fleet, missing[0], _spare(staying), done, now)
    is_quiet = len(staying) == len(fleet.engines) == target and not fleet.is_committing
    if outdated and is_quiet:
        return _make(state, fleet, record.wanted, outdated, done, now)
    return state, done


def versions_of_starts(
    state: UpgradeState, fleet: FleetView, needed: Collection[str], count: int
) -> list[Version]:
    """Of engines that replace others, or make the cluster larger: first those that are needed."""
    first = [state.record.get(name) for name in unmet(state, fleet, needed)[:count]]
    return [*first, *[state.starts] * (count - len(first))]


def unmet(state: UpgradeState, fleet: FleetView, needed: Collection[str]) -> list[str]:
    """Versions by which answers have begun, and of which no engine serves or starts."""
    there = {engine.version for engine in fleet.engines if engine.place is not Place.ENDING}
    return [name for name in state.record.known(sorted(needed)) if name not in there]


def on_failure(
    state: UpgradeState, failure: Failure, target: int, now: float
) -> tuple[UpgradeState, bool]:
    """An engine did not start. Returns whether this says all; else it is for the back-off of its
    rank."""
    record = state.record
    is_new = record.stage is UpgradeStage.IN_PROGRESS and failure.version == record.wanted
    can_go_back = is_new and (record.previous in record.proven or failure.permanent)
    if failure.no_room and not failure.is_extra:
        state = replace(state, no_room=state.no_room + 1)
        if can_go_back and state.no_room >= _MAX_NO_ROOM:
            return _roll_back(state, failure.reason), True
        return state, False
    if not is_new and not failure.is_extra:
        return replace(state, failing=failure.version), False
    if failure.no_room and target > 1:
        return replace(state, record=with_fields(record, in_place=True)), True
    if can_go_back:
        reason = failure.reason
        if failure.no_room:
            reason += "; an upgrade of one engine needs room for a second one beside it"
        return _roll_back(state, reason), True
    if failure.is_extra:
        backoff = state.backoff.failed(_EXTRA, now, failure.reason)
        return replace(state, backoff=backoff), True
    return state, False


def _observe(state: UpgradeState, fleet: FleetView, target: int) -> UpgradeState:
    """Note what has served, and whether the upgrade is complete."""
    record, staying = state.record, fleet.of(Place.SERVING)
    served = {e.version for e in (*staying, *_leaving(fleet))} - set(record.proven)
    if served:
        proven = (*record.proven, *sorted(served))
        record = with_fields(record, proven=tuple(record.known(proven)))
    is_whole = len(staying) >= target
    is_pure = all(engine.version == record.wanted for engine in fleet.engines)
    if is_pure and is_whole and len(fleet.engines) == target:
        stage = _ENDS.get(record.stage, record.stage)
        record = with_fields(record, stage=stage, in_place=False)
    state = replace(state, record=record)
    return replace(state, failing="", no_room=0) if is_whole else state


def _make(
    state: UpgradeState,
    fleet: FleetView,
    version: str,
    replaceable: Sequence[int],
    done: UpgradePlan,
    now: float,
) -> tuple[UpgradeState, UpgradePlan]:
    """One engine of this version: an extra one, or in the place of one of `replaceable`."""
    if any(engine.is_extra for engine in fleet.engines):
        return state, done
    num_serving = len(fleet.of(Place.SERVING))
    if state.record.in_place and num_serving > 1:
        if num_serving < len(fleet.engines) or not replaceable:
            return state, done
        leave = replaceable[-1]
        return state, replace(done, leave=(leave,), vacating=done.vacating | {leave})
    wait_s = state.backoff.wait_s(_EXTRA, now)
    if wait_s:
        return state, replace(done, wait_s=wait_s)
    return state, replace(done, extra=state.record.get(version))


def _roll_back(state: UpgradeState, reason: str) -> UpgradeState:
    record = state.record
    return UpgradeState(
        with_fields(
            record,
            wanted=record.previous,
            previous=record.wanted,
            stage=UpgradeStage.ROLLING_BACK,
            error=f"version {record.wanted} did not become ready, and version {record.previous} "
            f"serves on: {reason}",
        )
    )


def _leaving(fleet: FleetView) -> list[EngineStatus]:
    serving = (engine for engine in fleet.engines if engine.place is Place.SERVING)
    return [engine for engine in serving if engine.intent is not Intent.STAY]


def _last_of_version(
    fleet: FleetView, staying: list[EngineStatus], leaving: list[EngineStatus]
) -> frozenset[int]:
    """Engines that leave, and whose answers could continue on no other one. Where all engines are
    of one version, another one comes."""
    if len({engine.version for engine in fleet.engines}) < 2:
        return frozenset()
    there = {engine.version for engine in staying}
    return frozenset(engine.rank for engine in leaving if engine.version not in there)


def _spare(staying: list[EngineStatus]) -> list[int]:
    """Engines beside which another one of their version stays."""
    versions = [engine.version for engine in staying]
    return [engine.rank for engine in staying if versions.count(engine.version) > 1]
