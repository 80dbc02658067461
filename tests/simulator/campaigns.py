"""Random schedules in which something goes wrong while the cluster recovers from something else.

A campaign consists of a few moments. In each moment a fault happens or an operator changes
something. A fault is often repeated, hits two targets at once, or is followed by a fault that waits
for a message of the recovery. Meanwhile several ingresses have long answers, of several versions.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulator.model import BROKEN_WEIGHTS, POISON_SEED, VOCAB_SIZE
from tests.simulator.scenario import (
    FAST_STEP_S,
    HOSTS,
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
)

_BEGIN_S, _MOMENT_S = 3.0, 6.0
"""The first moment begins at about `_BEGIN_S`; each later one begins up to `_MOMENT_S` after the
previous one."""
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
LINKS = ("black-hole", "black-hole", "drop", "loss", "slow", "cut-pair", "half-cut-pair")
"""Faults of a link that come before a fault at one of its ends."""
ENDS = ("kill", "kill", "kill", "lose-worker", "stop", "hang", "kill-control", "kill-ingress")
"""Faults at an end of such a link."""
LOSSES = ("drop", "black-hole", "drop", "kill", "stop", "stop-control", "cut-pair", "loss")
"""Faults that a message triggers."""
CUTS = ("cut", "half-cut", "cut", "cut-pair", "half-cut-pair")
"""Cuts. Two of five separate only two hosts."""


def draw_campaign(random: Random, scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Draws a campaign from a scenario. `kinds`: the kinds of faults."""
    faults: list[Fault] = []
    operations: list[Operation] = []
    at = _BEGIN_S + random.random()
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.65:
            faults += _draw_trouble(random, kinds, at, expert=scenario.expert)
        if random.random() < 0.55:
            operations += _draw_operations(random, at, expert=scenario.expert)
            match random.choice(("calm", "calm", "weak", "aimed")):
                case "weak":
                    faults.append(_draw_weak_link(random, kinds, at))
                case "aimed":
                    faults.append(_draw_aimed(random, kinds, at, CHANGE, expert=scenario.expert))
        at += _MOMENT_S * random.random()
    if not faults and not operations:
        faults = _draw_trouble(random, kinds, at, expert=scenario.expert)
    ingresses = random.choice((1, 2, 2, 2, 3, 3))
    requests = [
        _draw_request(random, ingresses, at + _MOMENT_S) for _ in range(random.randint(4, 16))
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
        slow_load_s=random.choice((0.0, 0.0, 0.0, 2.0, 6.0)),
    )


def _fitting(operations: list[Operation], faults: list[Fault]) -> tuple[Operation, ...]:
    """Sorts operations by time. If a host is lost for good, it limits the number of engines to
    those that fit on the others."""
    if any(fault.kind == "lose-host-for-good" for fault in faults):
        operations = [
            replace(each, argument=min(each.argument, _ROOM)) if each.kind == "scale" else each
            for each in operations
        ]
    return tuple(sorted(operations, key=lambda operation: operation.at))


def _draw_request(random: Random, ingresses: int, until_s: float) -> Request:
    at = _BEGIN_S + random.random() * (until_s - _BEGIN_S)
    prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24)))
    max_tokens = random.choice((random.randint(1, 24), random.randint(50, 300)))
    gives_up_after = random.randint(1, 30) if random.random() < 0.1 else None
    ingress = random.randrange(ingresses)
    return Request(at, ingress, prompt, max_tokens, random.randrange(9), gives_up_after)


def _draw_time(random: Random) -> float:
    """Draws a duration: a moment, much longer, or about as long as it takes to be noticed."""
    edge_s = _STALL_TIMEOUT_S * random.uniform(0.5, 1.5)
    return random.choice((0.05, 1.0, edge_s, edge_s, 30.0 * (0.5 + random.random())))


def _draw_trouble(
    random: Random, kinds: tuple[str, ...], at: float, *, expert: bool
) -> list[Fault]:
    kind = random.choice([*kinds, *(each for each in OF_KIND if each in kinds)])
    if kind in CUTS:
        kind = random.choice([each for each in CUTS if each in kinds])
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
            kind = random.choice([each for each in ENDS if each in kinds] or kinds)
            hit = replace(first, kind=kind, at=at + 1.0 + random.random(), same=True)
            faults = [_draw_weak_link(random, kinds, at), hit]
    return faults


def _draw_weak_link(random: Random, kinds: tuple[str, ...], at: float) -> Fault:
    """Draws a fault of a link that lasts until processes have been replaced, or about until it is
    noticed."""
    kind = random.choice([each for each in LINKS if each in kinds] or kinds)
    trigger = AtMessage(random.choice(ALIVE), random.choice((1, 1, 2)))
    replaced_s = _REPLACED_S * random.uniform(1.0, 3.0)
    time_s = random.choice((replaced_s, replaced_s, _draw_time(random)))
    return Fault(kind, at, random.randrange(12), time_s, trigger)


def _draw_aimed(
    random: Random, kinds: tuple[str, ...], at: float, messages: tuple[str, ...], *, expert: bool
) -> Fault:
    """Draws a fault that one of these messages triggers."""
    messages += GROUP_RECOVERY if expert else ()
    trigger = AtMessage(random.choice(messages), random.choice((1, 1, 2, 5)))
    kind = random.choice([each for each in LOSSES if each in kinds] or kinds)
    return Fault(kind, at, random.randrange(12), _draw_time(random), trigger)


def _draw_operations(random: Random, at: float, *, expert: bool) -> list[Operation]:
    """Draws one change, often with its reversal or another change during it."""
    later = random.choice((0.05, 0.5, 2.0, 5.0)) * (0.5 + random.random())
    match random.choice(("scale", "drain", "pause", "upgrade", "upgrade", "upgrade")):
        case "scale":
            numbers = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
            return [Operation(at + i * later, "scale", n) for i, n in enumerate(numbers)]
        case "drain":
            return [Operation(at, "drain", random.randint(0, 2))]
        case "pause":
            level = random.randint(0, 2)
            return [Operation(at, "pause", level), Operation(at + 2 * later, "resume")]
    if expert:
        return [Operation(at, "scale", random.randint(1, 4))]
    operations = []
    for _ in range(random.choice((1, 1, 2, 3))):
        kind = random.choice(("upgrade", "update_weights", "update_weights", "redeploy"))
        weights = random.choice((0, 1, 1, 2, 2, BROKEN_WEIGHTS))
        operations.append(Operation(at, kind, weights))
        at += later
    return operations


assert len(HOSTS) > 2, "a partial cut leaves a way through a third host"
