"""Random schedules in which something goes wrong while the cluster recovers from something else.

A campaign consists of a few moments. In each moment a fault happens, an operator changes
something, or both. Most campaigns have only a few kinds of faults and changes, so that these meet
often: a mixture of all kinds seldom repeats one of them while it still has effects. A fault is
often repeated, hits two targets at once, hits an engine that a change concerns, or is followed by a
fault that waits for a message of the recovery. Meanwhile several ingresses have long answers, of
several versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.simulator.model import BROKEN_WEIGHTS, POISON_SEED, VOCAB_SIZE
from tests.simulator.scenario import (
    FAST_STEP_S,
    HOSTS,
    IMPATIENT_S,
    PATIENT_S,
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
)

_BEGIN_S = 3.0
"""The first moment begins at about this time."""
_PAUSES_S = (0.5, 2.0, 4.0)
"""The times between two moments. A campaign has one of them."""
_ARRIVALS_S = 4.0
"""The time after the last moment within which requests arrive."""
_STALL_TIMEOUT_S = 10.0
"""Equals `STALL_TIMEOUT_S` in `control_plane.py`: a fault of about this length is sometimes
noticed, sometimes not."""
_REPLACED_S = 3.0
"""The approximate time until a process that was lost, or got other weights, has a successor."""
_POISON_SHARE = 0.05
_ROOM = 3
_ROOMS = ((1, 2, 3), (2, 2, 2), (1, 3, 2), (0, 3, 3))
"""Engines that fit on each host. At least `_ROOM` fit without any one host except the first."""

RECOVERY = (
    "Broken",
    "Repaired",
    "Introduce",
    "EngineHello",
    "EngineReport",
    "CoordinatorHeartbeat",
    "Subscribe",
    "ClusterView",
    "ClusterReports",
    "ReplaceClient",
    "KeepAliveReply",
    "EngineCoreRequest",
)
"""Messages by which a cluster detects a failure and recovers from it."""
GROUP_RECOVERY = ("ReconfigureDistributedRequest", "Joined", "Pause", "Paused", "Resume")
"""Additional messages for engines that share experts."""
OF_KIND = {
    "lose-worker": ("Broken", "Repaired", "Introduce"),
    "kill-control": ("Introduce", "EngineHello", "Subscribe", "CoordinatorHeartbeat"),
    "kill": ("EngineHello", "ClusterView", "EngineCoreRequest"),
    "kill-ingress": ("ReplaceClient", "Subscribe", "KeepAlive"),
    "drain-host": ("EngineHello", "ClusterView", "EngineReport"),
    "second-manager": ("EngineHello", "CoordinatorHeartbeat", "ClusterView"),
    "black-hole": ("EngineReport", "EngineHello", "CoordinatorHeartbeat", "KeepAliveReply"),
}
"""The messages of the recovery from some kinds of faults."""
CHANGE = (
    "EngineReport",
    "EngineHello",
    "ClusterView",
    "CoordinatorHeartbeat",
    "EngineCoreRequest",
    "EngineCoreOutputs",
)
"""Messages that are sent while an operator changes something."""
ALIVE = ("EngineReport", "EngineReport", "EngineReport", "KeepAlive", "Subscribe")
"""Messages that living processes send periodically."""
CHANGES = ("scale", "scale", "drain", "pause", "upgrade", "upgrade")
"""Changes by an operator."""
LINKS = ("black-hole", "black-hole", "drop", "loss", "slow", "cut-pair", "half-cut-pair")
"""Faults of a link that come before a fault at one of its ends."""
ENDS = ("kill", "kill", "kill", "lose-worker", "stop", "hang", "kill-control", "kill-ingress")
"""Faults at an end of such a link."""
LOSSES = ("drop", "black-hole", "drop", "kill", "stop", "stop-control", "cut-pair", "loss")
"""Faults that a message triggers."""
LEADERS = ("kill-control", "second-manager", "stop-control", "kill-control", "gcs-away")
"""Faults that leave a change to another manager or coordinator, perhaps after a while."""
RECOVERIES = ("lose-worker", "lose-worker", "kill", "stop", "drop", "kill-ingress")
"""Faults from which an engine recovers, during which an operator changes the number of engines and
changes it back."""
OBSTACLES = ("hang", "stop", "cut-pair", "half-cut-pair", "cut-pair", "half-cut-pair", "black-hole")
"""Faults that prevent a group from forming."""
CUTS = ("cut", "half-cut", "cut", "cut-pair", "half-cut-pair")
"""Cuts. Two of five separate only two hosts."""


@dataclass(frozen=True)
class Kinds:
    """The kinds of faults of one campaign."""

    common: tuple[str, ...]
    """The kinds that begin a trouble."""
    possible: tuple[str, ...]
    """The kinds that weaken a link, or hit a message or an end of a link."""


def draw_campaign(random: Random, scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Draws a campaign from a scenario. `kinds`: the kinds of faults."""
    drawn, changes = _draw_kinds(random, kinds), _draw_changes(random)
    focus = random.choice((None, None, random.randrange(12)))
    pause_s = random.choice(_PAUSES_S)
    faults: list[Fault] = []
    operations: list[Operation] = []
    moments: list[float] = []
    at = _BEGIN_S + random.random()
    for _ in range(random.choice((1, 2, 2, 3, 4, 5))):
        moments.append(at)
        new_faults, new_operations = _draw_moment(
            random, at, drawn, changes, expert=scenario.expert
        )
        faults += new_faults
        operations += new_operations
        at += pause_s * (0.5 + random.random())
    if focus is not None:
        faults = [replace(each, target=focus) for each in faults]
    ingresses = random.choice((1, 2, 2, 2, 3, 3))
    until_s = at + _ARRIVALS_S
    requests = [
        _draw_request(random, ingresses, moments, until_s) for _ in range(random.randint(4, 16))
    ]
    if random.random() < _POISON_SHARE:
        requests[0] = replace(requests[0], seed=POISON_SEED, gives_up_after=None)
        if random.random() < 0.5:  # no other faults
            faults = []
    return replace(
        scenario,
        engines=random.choice((1, 2, 2, 3, 3)),
        ingresses=ingresses,
        requests=tuple(sorted(requests, key=lambda request: request.at)),
        faults=tuple(faults),
        operations=_fitting(operations, faults),
        step_s=random.choice((FAST_STEP_S, SLOW_STEP_S, SLOW_STEP_S)),
        autoscaled=scenario.autoscaled and random.random() < 0.5,
        rooms=random.choice(_ROOMS),
        slow_load_s=random.choice((0.0, 0.0, 2.0, 6.0)),
        no_engine_timeout_s=random.choice((PATIENT_S, PATIENT_S, IMPATIENT_S)),
    )


def _draw_moment(
    random: Random, at: float, kinds: Kinds, changes: tuple[str, ...], *, expert: bool
) -> tuple[list[Fault], list[Operation]]:
    """Draws the faults and the changes of one moment."""
    what = random.choice(("trouble", "change", "change", "both", "both", "reversal", "leaderless"))
    if what == "trouble":
        return _draw_trouble(random, kinds, at, expert=expert), []
    if what == "reversal" and expert and random.random() < 0.4:
        return _draw_late_group(random, kinds, at)
    if what == "reversal":
        return _draw_reversal(random, kinds, at)
    if what == "leaderless":
        return _draw_leaderless(random, kinds, at, changes, expert=expert)
    operations = _draw_operations(random, at, changes, expert=expert)
    if what == "change":
        match random.choice(("calm", "calm", "weak", "aimed")):
            case "weak":
                return [_draw_weak_link(random, kinds, at)], operations
            case "aimed":
                return [_draw_aimed(random, kinds, at, CHANGE, expert=expert)], operations
        return [], operations
    later_s = random.choice((0.0, 0.05, 0.5, 2.0)) * (0.5 + random.random())
    faults = _draw_trouble(random, kinds, at + later_s, expert=expert)
    if random.random() < 0.3:  # the change comes during the trouble
        operations = [replace(each, at=each.at + 2 * later_s) for each in operations]
    return [replace(each, changing=random.random() < 0.6) for each in faults], operations


def _draw_reversal(random: Random, kinds: Kinds, at: float) -> tuple[list[Fault], list[Operation]]:
    """Draws engines that recover from a fault while fewer engines are requested, and then more
    again: an engine may recover, leave, and be kept at the same time."""
    kind, first = random.choice(_among(RECOVERIES, kinds)), random.randrange(12)
    time_s = random.choice((0.3, 1.5)) * (0.5 + random.random())
    faults = [
        Fault(kind, at + 0.2 * index * random.random(), first + index, time_s)
        for index in range(random.choice((1, 2, 3)))
    ]
    fewer_at = at + random.choice((-0.3, 0.05, 0.5)) * (0.5 + random.random())
    more_at = fewer_at + random.choice((0.05, 0.3, 1.0)) * (0.5 + random.random())
    fewer = random.choice((1, 1, 2))
    operations = [Operation(fewer_at, "scale", fewer)]
    if random.random() < 0.8:
        operations.append(Operation(more_at, "scale", fewer + random.choice((1, 2))))
    return faults, operations


def _draw_late_group(
    random: Random, kinds: Kinds, at: float
) -> tuple[list[Fault], list[Operation]]:
    """Draws a group that does not form in time while it grows or shrinks: an engine of it does not
    compute or is not reached, often for longer than the time after which the coordinator acts."""
    kind = random.choice(_among(OBSTACLES, kinds))
    time_s = random.choice((_STALL_TIMEOUT_S, 3.0 * _STALL_TIMEOUT_S, 6.0 * _STALL_TIMEOUT_S))
    trigger = AtMessage(random.choice(GROUP_RECOVERY[:2]), random.choice((1, 2, 3)))
    fault = Fault(
        kind,
        at,
        random.randrange(12),
        time_s * (0.5 + random.random()),
        random.choice((trigger, trigger, None)),
        changing=random.random() < 0.5,
    )
    numbers = random.choice(((3,), (4,), (1, 3), (2, 4)))
    return [fault], [Operation(at + i * 2.0, "scale", n) for i, n in enumerate(numbers)]


def _draw_leaderless(
    random: Random, kinds: Kinds, at: float, changes: tuple[str, ...], *, expert: bool
) -> tuple[list[Fault], list[Operation]]:
    """Draws a loss of the manager or the coordinator while a change is in progress, or before
    another fault: a successor finds both."""
    kind = random.choice(_among(LEADERS, kinds))
    later_s = random.choice((0.05, 0.3, 1.0, 3.0)) * (0.5 + random.random())
    loss = Fault(kind, at + later_s, random.randrange(12), _draw_time(random))
    if random.random() < 0.6:
        return [loss], _draw_operations(random, at, changes, expert=expert)
    hit = random.choice(_among(ENDS, kinds))
    hit_at = loss.at + random.choice((0.1, 1.0, 4.0)) * (0.5 + random.random())
    faults = [loss, Fault(hit, hit_at, random.randrange(12), _draw_time(random))]
    if kind != "gcs-away" and "gcs-away" in kinds.possible and random.random() < 0.4:
        faults.insert(0, replace(loss, kind="gcs-away", time_s=_draw_time(random)))
    return faults, []


def _draw_kinds(random: Random, kinds: tuple[str, ...]) -> Kinds:
    """Draws the common kinds: few, so that they meet often, or all."""
    weighted = [*kinds, *(each for each in OF_KIND if each in kinds)]
    number = random.choice((1, 2, 2, 3, len(weighted)))
    common = random.sample(weighted, min(number, len(weighted)))
    return Kinds(tuple(dict.fromkeys(common)), kinds)


def _draw_changes(random: Random) -> tuple[str, ...]:
    return tuple(random.sample(CHANGES, random.choice((1, 1, 2, len(CHANGES)))))


def _fitting(operations: list[Operation], faults: list[Fault]) -> tuple[Operation, ...]:
    """Sorts operations by time. If a host is lost for good, it limits the number of engines to
    those that fit on the others."""
    if any(fault.kind == "lose-host-for-good" for fault in faults):
        operations = [
            replace(each, argument=min(each.argument, _ROOM)) if each.kind == "scale" else each
            for each in operations
        ]
    return tuple(sorted(operations, key=lambda operation: operation.at))


def _draw_request(random: Random, ingresses: int, moments: list[float], until_s: float) -> Request:
    """Draws a request that arrives about a moment, or at any time before `until_s`."""
    at = random.choice(moments) + random.uniform(-0.3, 1.0)
    if random.random() < 0.5:
        at = random.uniform(_BEGIN_S, until_s)
    prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24)))
    max_tokens = random.choice((random.randint(1, 24), random.randint(50, 300)))
    gives_up_after = random.randint(1, 30) if random.random() < 0.1 else None
    ingress = random.randrange(ingresses)
    return Request(at, ingress, prompt, max_tokens, random.randrange(9), gives_up_after)


def _draw_time(random: Random) -> float:
    """Draws a duration: a moment, much longer, or about as long as it takes to be noticed."""
    edge_s = _STALL_TIMEOUT_S * random.uniform(0.5, 1.5)
    return random.choice((0.05, 1.0, edge_s, edge_s, 30.0 * (0.5 + random.random())))


def _draw_trouble(random: Random, kinds: Kinds, at: float, *, expert: bool) -> list[Fault]:
    kind = random.choice([*kinds.common, *(each for each in OF_KIND if each in kinds.common)])
    if kind in CUTS:
        kind = random.choice([each for each in CUTS if each in kinds.possible])
    first = Fault(kind, at, random.randrange(12), _draw_time(random))
    faults = [first]
    match random.choice(("once", "again", "pair", "chased", "chased", "weak", "weak")):
        case "again":  # the next fault may hit the successor
            for _ in range(random.randint(1, 3)):
                at += random.choice((0.3, 1.5, 4.0)) * (0.5 + random.random())
                at += first.time_s if random.random() < 0.5 else 0.0
                time_s = random.choice((first.time_s, _draw_time(random)))
                same = random.random() < 0.3
                faults.append(replace(first, at=at, time_s=time_s, same=same))
        case "pair":
            faults.append(replace(first, at=at + 0.05 * random.random(), target=first.target + 1))
        case "chased":
            messages: tuple[str, ...] = RECOVERY
            if kind in OF_KIND and random.random() < 0.6:
                expert, messages = False, OF_KIND[kind]
            faults.append(_draw_aimed(random, kinds, at + 0.001, messages, expert=expert))
        case "weak":  # a link fails, then one of its ends before the link has recovered
            kind = random.choice(_among(ENDS, kinds))
            hit = replace(first, kind=kind, at=at + 1.0 + random.random(), same=True)
            faults = [_draw_weak_link(random, kinds, at), hit]
    return faults


def _among(names: tuple[str, ...], kinds: Kinds) -> list[str]:
    return [each for each in names if each in kinds.possible] or list(kinds.possible)


def _draw_weak_link(random: Random, kinds: Kinds, at: float) -> Fault:
    """Draws a fault of a link that lasts until processes have been replaced, or about until it is
    noticed."""
    kind = random.choice(_among(LINKS, kinds))
    trigger = AtMessage(random.choice(ALIVE), random.choice((1, 1, 2)))
    replaced_s = _REPLACED_S * random.uniform(1.0, 3.0)
    time_s = random.choice((replaced_s, replaced_s, _draw_time(random)))
    return Fault(kind, at, random.randrange(12), time_s, trigger)


def _draw_aimed(
    random: Random, kinds: Kinds, at: float, messages: tuple[str, ...], *, expert: bool
) -> Fault:
    """Draws a fault that one of these messages triggers."""
    messages += GROUP_RECOVERY if expert else ()
    trigger = AtMessage(random.choice(messages), random.choice((1, 1, 2, 5)))
    kind = random.choice(_among(LOSSES, kinds))
    return Fault(kind, at, random.randrange(12), _draw_time(random), trigger)


def _draw_operations(
    random: Random, at: float, changes: tuple[str, ...], *, expert: bool
) -> list[Operation]:
    """Draws one change, often with its reversal or another change during it."""
    later = random.choice((0.05, 0.5, 2.0, 5.0)) * (0.5 + random.random())
    match random.choice(changes):
        case "scale":
            numbers = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
            return [Operation(at + i * later, "scale", n) for i, n in enumerate(numbers)]
        case "drain":
            return [Operation(at, "drain", random.randint(0, 2))]
        case "pause":
            level = random.randint(0, 2)
            return [Operation(at, "pause", level), Operation(at + 2 * later, "resume")]
    if expert:  # they are never upgraded
        numbers = [random.randint(1, 4), random.randint(1, 4)]
        return [Operation(at + i * later, "scale", n) for i, n in enumerate(numbers)]
    operations = []
    for _ in range(random.choice((1, 1, 2, 3))):
        kind = random.choice(("upgrade", "update_weights", "update_weights", "redeploy"))
        weights = random.choice((0, 1, 1, 2, 2, BROKEN_WEIGHTS))
        operations.append(Operation(at, kind, weights))
        at += later
    return operations


assert len(HOSTS) > 2, "a partial cut leaves a way through a third host"
