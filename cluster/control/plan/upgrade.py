"""The version that a cluster's engines must run: how an upgrade starts, completes and fails. Pure:
time is an argument.

    IN_PROGRESS --- all engines are of the new version ---> SETTLED
        |
        +--- one does not become ready, or it is cancelled ---> ROLLING_BACK ---> FAILED

If an engine of the new version does not become ready, the upgrade is rolled back: the previous
version is the target again, and engines of the failed version are replaced in the same way. If the
previous version does not start either, it is retried with a growing delay. An operator may request
another version in each stage. `upgrade_plan.py` decides what each engine does.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from swell.cluster.control.plan.backoff import Backoff, MissingEngine
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.fleet_view import FleetView, Intent, Place
from swell.cluster.control.plan.versions import MAX_VERSIONS, UpgradeRecord, UpgradeStage, Version
from swell.configs.schema import Config

_MAX_NO_ROOM = 3
"""Failed starts without room, in the place of an engine that has left, after which the version
counts as too large for that place."""
_ENDS = {
    UpgradeStage.IN_PROGRESS: UpgradeStage.SETTLED,
    UpgradeStage.ROLLING_BACK: UpgradeStage.FAILED,
}
"""Stage of a change -> its stage once all engines run the target version."""


class UpgradeRefused(ScaleRefused):
    """Raised for an upgrade that cannot be made; the message says why."""


class UpgradeState(msgspec.Struct, frozen=True):
    record: UpgradeRecord
    backoff: Backoff = msgspec.field(default_factory=Backoff)
    """Back-off of versions, by version number: for extra engines, reloads, and engines that
    unfinished responses need."""
    no_room: int = 0
    """Starts in a row that found no room, in the place of a missing engine."""
    no_room_beside: str = ""
    """A version whose extra engine found no room; reset when an engine leaves for that version."""
    failing: str = ""
    """A version whose engines are missing and do not start; a new version takes their places. Reset
    once the target number of engines serves."""
    gives_way: int | None = None
    """Rank of the engine that leaves to make room for one that unfinished responses need."""
    freed_at: float = float("-inf")
    """When an engine was last seen terminating."""
    is_freeing: bool = False
    """An engine was terminating at the last observation."""

    @property
    def is_untried(self) -> bool:
        """Whether the new version has not served yet."""
        record = self.record
        return record.stage is UpgradeStage.IN_PROGRESS and record.wanted not in record.proven

    @property
    def starts(self) -> Version:
        """The version of an engine that replaces another one: the new version only after it has
        served, unless there is no room for an extra engine or the previous version does not
        start."""
        record = self.record
        is_direct = record.in_place or self.failing == record.previous
        if self.is_untried and not is_direct and record.previous in record.proven:
            return record.get(record.previous)
        return record.get(record.wanted)

    def was_tried_again(self, version: str) -> bool:
        """Whether two starts in a row of this version have failed."""
        return self.backoff.failures(self.number_of(version)) > 1

    def number_of(self, version: str) -> int:
        """Returns the number of a version; 0: it was forgotten."""
        found = self.record.find(version)
        return 0 if found is None else found.number

    def wait_s(self, version: str, now: float) -> float:
        """Returns the seconds until an engine of this version may be tried in addition to the
        target number."""
        return self.backoff.wait_s(self.record.get(version).number, now)

    def lacks_room(self, fleet: FleetView) -> bool:
        """Whether there is not enough room for the target number of engines."""
        return self.no_room > 0 or any(engine.waits_for_room for engine in fleet.engines)


class Failure(msgspec.Struct, frozen=True):
    """A failed start of an engine."""

    version: str
    reason: str
    is_extra: bool = False
    for_answers: bool = False
    """The engine was started for unfinished responses."""
    no_room: bool = False
    """There was no room, so no process was started."""
    is_reload: bool = False
    """The engine was loading other weights in place of its own."""
    permanent: bool = False
    """The start would fail again in the same way."""


def take_over(
    record: UpgradeRecord, config_hash: str, config: Config, in_use: Collection[str] = ()
) -> UpgradeState:
    """Continues with the record of the previous manager. If its application was deployed with
    another configuration, this is an upgrade. `in_use`: see `begin`."""
    if record.find(record.wanted) is None:
        version = Version.of(1, config_hash, config)
        return UpgradeState(
            UpgradeRecord((version,), version.name, version.name, deployed=config_hash)
        )
    if config_hash == record.deployed:
        return UpgradeState(record)
    state = UpgradeState(replace(record, deployed=config_hash))
    if config_hash == record.get(record.wanted).config_hash:
        return state
    return _want(state, config_hash, config, in_use)


def begin(
    state: UpgradeState,
    config_hash: str,
    config: Config,
    in_use: Collection[str],
    recent: Collection[str] = (),
    *,
    in_place: bool = False,
) -> UpgradeState:
    """Sets another target version, also during an upgrade. Requesting the version before an upgrade
    cancels the upgrade. `in_use`: versions of engines and of unfinished responses. `recent`:
    versions that unfinished responses may need, although no ingress has reported it yet.
    `in_place`: only the weights differ, and engines of the lineage keep their processes. Raises
    UpgradeRefused."""
    record = state.record
    wanted = record.get(record.wanted)
    if in_place:
        if _beside_weights(config) != _beside_weights(wanted.config):
            raise UpgradeRefused("another version was requested in the meantime: try again")
        config_hash = _known_config_hash(record, wanted.weights_lineage, config) or config_hash
    if config_hash == wanted.config_hash:
        raise UpgradeRefused(
            f"version {wanted.name} already has this configuration (upgrade: {record.phase}); to "
            "load other weights, set another model.path"
        )
    fallback = record.get(_fallback(record))
    if len(in_use) >= MAX_VERSIONS and config_hash != fallback.config_hash:
        raise UpgradeRefused(
            f"{len(in_use)} versions have engines or unfinished answers "
            f"({', '.join(sorted(in_use))}), and the limit is {MAX_VERSIONS}: wait until one of "
            "them has none"
        )
    base = wanted.weights_lineage if in_place else ""
    return _want(state, config_hash, config, {*in_use, *recent}, base)


def _want(
    state: UpgradeState, config_hash: str, config: Config, kept: Collection[str], base: str = ""
) -> UpgradeState:
    """`kept`: versions that must not be forgotten."""
    record = state.record
    fallback, is_new = _fallback(record), record.stage is UpgradeStage.IN_PROGRESS
    if is_new and config_hash == record.get(fallback).config_hash:
        return _roll_back(state, None)
    version = Version.of(record.versions[-1].number + 1, config_hash, config, base)
    versions, keep = (*record.versions, version), {record.wanted, fallback, *kept}
    earlier = (each for each in versions[:-MAX_VERSIONS] if each.name in keep)
    return UpgradeState(
        replace(
            record,
            versions=(*earlier, *versions[-MAX_VERSIONS:]),
            wanted=version.name,
            previous=fallback,
            stage=UpgradeStage.IN_PROGRESS,
            in_place=False,
            error=None,
            is_cancelled=False,
            counts=record.counts.plus(cancelled=1) if is_new else record.counts,
        ),
        failing=state.failing,
    )


def _beside_weights(config: Config) -> Config:
    """Returns the part of a configuration that versions of one weights lineage share."""
    return replace(config, model=replace(config.model, path="", load_format="auto"))


def _known_config_hash(record: UpgradeRecord, weights_lineage: str, config: Config) -> str | None:
    """Returns the hash of a known version of this lineage with these weights. It may have been
    given with other settings, such as `model.device=auto`, that have been resolved since."""
    path = config.model.path
    same = (each for each in record.versions if each.weights_lineage == weights_lineage)
    return next((each.config_hash for each in same if each.settings["model"]["path"] == path), None)


def _fallback(record: UpgradeRecord) -> str:
    """Returns the version to return to if an upgrade is given up: the last one that all engines
    ran."""
    if record.stage is not UpgradeStage.IN_PROGRESS:
        return record.wanted
    never_served = record.wanted in record.proven and record.previous not in record.proven
    return record.wanted if never_served else record.previous


def observe(state: UpgradeState, fleet: FleetView, target: int, now: float) -> UpgradeState:
    """Records which versions have served, and whether the upgrade is complete."""
    record, serving = state.record, [e for e in fleet.engines if e.place is Place.SERVING]
    staying = fleet.of(Place.SERVING)
    if fresh := {engine.version for engine in serving} - set(record.proven):
        proven = (*record.proven, *sorted(fresh))
        record = replace(record, proven=tuple(record.known(proven)))
    is_whole = len(staying) >= target
    is_pure = all(engine.version == record.wanted for engine in fleet.engines)
    if record.stage is not UpgradeStage.IN_PROGRESS and staying and state.lacks_room(fleet):
        is_complete = is_pure  # no version has room for the missing engines
    else:
        is_complete = is_pure and is_whole and len(fleet.engines) == target
    if is_complete:
        done = record.stage is UpgradeStage.IN_PROGRESS
        stage, counts = _ENDS.get(record.stage, record.stage), record.counts.plus(done=done)
        record = replace(record, stage=stage, in_place=False, counts=counts)
    frees = any(
        engine.place is Place.ENDING
        or (engine.place is Place.STARTING and engine.intent is not Intent.STAY)
        for engine in fleet.engines
    )
    state = replace(
        state,
        record=record,
        freed_at=now if frees or state.is_freeing else state.freed_at,
        is_freeing=frees,
    )
    return replace(state, failing="", no_room=0) if is_whole else state


def on_failure(
    state: UpgradeState, failure: Failure, target: int, now: float
) -> tuple[UpgradeState, bool]:
    """Handles a failed start. Returns whether the upgrade handles it; if not, the failure also
    counts for the back-off of its rank."""
    record = state.record
    is_apart = failure.is_extra or failure.for_answers or failure.is_reload
    if is_apart:
        number = state.number_of(failure.version)
        backoff = state.backoff.failed(number, now, failure.reason, permanent=failure.permanent)
        state = replace(state, backoff=backoff)
    if failure.no_room and failure.for_answers:
        return state, True
    if failure.no_room and failure.is_extra:
        if target > 1 or not state.is_untried:
            record = replace(record, in_place=True)
            return replace(state, record=record, no_room_beside=failure.version), True
        reason = "; the upgrade of a cluster with one engine needs room for a second engine"
        failure = replace(failure, reason=failure.reason + reason)
    elif failure.no_room:
        state = replace(state, no_room=state.no_room + 1)
        if state.no_room < _MAX_NO_ROOM:
            return state, False
    is_new = record.stage is UpgradeStage.IN_PROGRESS and failure.version == record.wanted
    if failure.is_reload and not (failure.permanent or state.was_tried_again(failure.version)):
        return state, False  # its processes died, perhaps for another reason than the weights
    if is_new and (record.previous in record.proven or failure.permanent):
        return _roll_back(state, failure.reason), True
    if not (is_new or is_apart or failure.no_room):
        state = replace(state, failing=failure.version)
    return state, is_apart


def on_joined(state: UpgradeState, version: str) -> UpgradeState:
    """Records that a started engine serves."""
    return replace(state, backoff=state.backoff.started(state.number_of(version)))


def on_death(
    state: UpgradeState, version: str, lived_s: float, now: float, reason: str
) -> UpgradeState:
    """Records that an engine died after it had served for `lived_s`."""
    found = state.record.find(version)
    if found is None:
        return state
    return replace(state, backoff=state.backoff.died(found.number, lived_s, now, reason))


def failing_version(
    state: UpgradeState, needed: Collection[str], missing: MissingEngine | None, now: float
) -> tuple[str, MissingEngine] | None:
    """Returns a version that does not start although it is the target or unfinished responses need
    it, and why. `missing`: why engines are missing."""
    record = state.record
    for name in record.known([record.wanted, *sorted(needed)]):
        if (found := state.backoff.missing_engine(record.get(name).number, now)) is not None:
            return name, found
    if missing is not None and record.stage is UpgradeStage.ROLLING_BACK:
        return record.wanted, missing
    return None


def _roll_back(state: UpgradeState, reason: str | None) -> UpgradeState:
    """Gives up the target version for the previous one. `reason`: why; None: an operator requested
    it."""
    record, is_cancelled = state.record, reason is None
    text = (
        f"version {record.wanted} did not become ready, so version {record.previous} is the target "
    )
    return UpgradeState(
        replace(
            record,
            wanted=record.previous,
            previous=record.wanted,
            stage=UpgradeStage.ROLLING_BACK,
            error=None if is_cancelled else f"{text}again: {reason}",
            is_cancelled=is_cancelled,
            counts=record.counts.plus(cancelled=is_cancelled, failed=not is_cancelled),
        )
    )
