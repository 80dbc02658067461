"""Moments of campaigns: in each, a fault happens, an operator changes something, or both.

A fault is often repeated, hits two targets at once, hits an engine that a change concerns, or is
followed by a fault that waits for a message of the recovery. Changes often overlap: the next one
comes while the previous one is carried out, while nobody leads, or while nothing can be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from tests.simulator.draws.faults import (
    draw_aimed,
    draw_failed_calls,
    draw_faults,
    draw_loss_of_leader,
    draw_time,
    draw_weak_link,
)
from tests.simulator.draws.kinds import (
    CHANGE,
    CHANGES,
    ENDS,
    GROUP_RECOVERY,
    LEADERS,
    LOSSES,
    MANAGERS,
    OBSTACLES,
    RECOVERIES,
    RECOVERY,
    STALL_TIMEOUT_S,
    STEPS,
    Mix,
)
from tests.simulator.draws.operations import draw_operations
from tests.simulator.model import BROKEN_WEIGHTS
from tests.simulator.scenario import HOSTS, AtMessage, Fault, Operation

_GCS_TIMEOUT_S = 10.0
"""The time after which a request to Ray's GCS fails."""
_STEP_SHARE = 0.3
"""The share of moments with several changes whose last one is requested at a step of another one,
or of a recovery."""
_FAILED_SHARE = 0.3
"""The share of moments in which calls through Ray fail."""
_CROWDED_SHARE = 0.15
"""The share of moments in which several requests arrive at one of the faults or changes."""
_GROUP_SIZES = ((3,), (4,), (1, 3), (2, 3), (2, 4), (1, 2), (2, 1, 3), (3, 4))
_REVERSALS = ((1, 2), (1, 3), (2, 3), (1, 4), (2, 1, 3), (3, 1, 4))
"""The numbers of engines that are requested while a group does not form, in usual and in busy
campaigns."""
_NUM_WEIGHTS = BROKEN_WEIGHTS
"""The number of weights that load."""


@dataclass(frozen=True)
class Moment:
    """The faults and the changes of one moment."""

    faults: list[Fault] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    crowds: list[float] = field(default_factory=list)
    """Times from which on several requests arrive at once."""


def draw_moment(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a moment that begins at about `at`."""
    weights = [weights[mix.is_busy] for weights, _ in _MOMENTS]
    [(_, drawn)] = random.choices(_MOMENTS, weights)
    moment = drawn(random, mix, at)
    if len(moment.operations) > 1 and random.random() < _STEP_SHARE:
        moment = replace(moment, operations=_overlapping(random, moment.operations))
    if "fail-call" in mix.possible and random.random() < _FAILED_SHARE:
        moment = replace(moment, faults=[*moment.faults, *draw_failed_calls(random, mix, at)])
    if random.random() < _CROWDED_SHARE:
        times = [fault.at for fault in moment.faults]
        times += [operation.at for operation in moment.operations]
        moment = replace(moment, crowds=[*moment.crowds, random.choice(times)])
    return moment


def _overlapping(random: Random, operations: list[Operation]) -> list[Operation]:
    """Makes the last change begin at a step of the others, or of a recovery. A pause has an end in
    each case."""
    *earlier, last = operations
    if last.kind == "resume":
        return operations
    trigger = AtMessage(random.choice((*STEPS, *RECOVERY)), random.choice((1, 1, 2)))
    return [*earlier, replace(last, at=earlier[0].at + 0.001, trigger=trigger)]


def _draw_trouble(random: Random, mix: Mix, at: float) -> Moment:
    return Moment(draw_faults(random, mix, at))


def _draw_change(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a change, some over a weak link or with a fault that hits a message about it."""
    operations = draw_operations(random, mix, at)
    match random.choice(("calm", "calm", "weak", "aimed")):
        case "weak":
            return Moment([draw_weak_link(random, mix, at)], operations)
        case "aimed":
            return Moment([draw_aimed(random, mix, at, CHANGE)], operations)
    return Moment([], operations)


def _draw_both(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a change and faults, which often hit an engine that changes."""
    operations = draw_operations(random, mix, at)
    later_s = random.choice((0.0, 0.05, 0.5, 2.0)) * (0.5 + random.random())
    faults = draw_faults(random, mix, at + later_s)
    if random.random() < 0.3:  # the change comes during the trouble
        operations = [replace(each, at=each.at + 2 * later_s) for each in operations]
    return Moment([replace(f, changing=random.random() < 0.6) for f in faults], operations)


def _draw_reversal(random: Random, mix: Mix, at: float) -> Moment:
    """Draws engines that recover from a fault while fewer engines are requested, and then more
    again: an engine may recover, leave, and be kept at the same time."""
    kind, first = random.choice(mix.among(RECOVERIES)), random.randrange(12)
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
    return Moment(faults, operations)


def _draw_late_group(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a group that does not form in time while it grows or shrinks: an engine of it does not
    compute or is not reached, often for longer than the time after which the coordinator acts.
    Meanwhile the manager may be lost, and the change be reversed. Engines that share nothing have a
    reversal instead."""
    if not mix.expert:
        return _draw_reversal(random, mix, at)
    kind = random.choice(mix.among(OBSTACLES))
    time_s = STALL_TIMEOUT_S * random.choice((1.0, 3.0, 6.0))
    trigger = AtMessage(random.choice(GROUP_RECOVERY[:2]), random.choice((1, 2, 3)))
    fault = Fault(
        kind,
        at,
        random.randrange(12),
        time_s * (0.5 + random.random()),
        random.choice((trigger, trigger, None)),
        changing=random.random() < 0.5,
    )
    numbers = random.choice(_REVERSALS if mix.is_busy else _GROUP_SIZES)
    later_s = random.choice((0.3, 2.0, 2.0, 6.0)) * (0.5 + random.random())
    operations = [Operation(at + i * later_s, "scale", n) for i, n in enumerate(numbers)]
    ends = ("led", "lost") if mix.is_busy else ("led", "led", "lost")
    match random.choice((*ends, "taken over", "taken over")):
        case "lost":
            lost_at = at + random.choice((0.3, 1.0, 4.0)) * (0.5 + random.random())
            loss, after = draw_loss_of_leader(random, mix, lost_at)
            return Moment([fault, loss], [*operations, *after])
        case "taken over":  # the group waits, and a successor gets the next request
            kind = random.choice(mix.among(MANAGERS))
            steps = ("detach", "join", GROUP_RECOVERY[0])
            more = ("detach", "detach") if mix.is_busy else ()
            trigger = AtMessage(random.choice((*steps, *more)), 1)
            loss = Fault(kind, at, random.randrange(12), draw_time(random), trigger)
            if random.random() < 0.7:
                operations[-1] = replace(operations[-1], at=at + 0.01, trigger=trigger)
            return Moment([fault, loss], operations)
    return Moment([fault], operations)


def _draw_leaderless(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a loss of the manager or the coordinator while a change is in progress, often at one of
    its steps, or before another fault: a successor finds both."""
    if random.random() < 0.6:
        operations = draw_operations(random, mix, at)
        if random.random() < 0.5:
            loss, after = draw_loss_of_leader(random, mix, at + 0.3 * random.random())
        else:
            later_s = random.choice((0.05, 0.3, 1.0, 3.0)) * (0.5 + random.random())
            loss, after = draw_loss_of_leader(random, mix, at + later_s)
            loss = replace(loss, trigger=None)
        return Moment([loss], [*operations, *after])
    later_s = random.choice((0.05, 0.3, 1.0, 3.0)) * (0.5 + random.random())
    kind = random.choice(mix.among(LEADERS))
    loss = Fault(kind, at + later_s, random.randrange(12), draw_time(random))
    hit = random.choice(mix.among(ENDS))
    hit_at = loss.at + random.choice((0.1, 1.0, 4.0)) * (0.5 + random.random())
    faults = [loss, Fault(hit, hit_at, random.randrange(12), draw_time(random))]
    if kind != "gcs-away" and "gcs-away" in mix.possible and random.random() < 0.4:
        faults.insert(0, replace(loss, kind="gcs-away", time_s=draw_time(random)))
    return Moment(faults)


def _draw_flurry(random: Random, mix: Mix, at: float) -> Moment:
    """Draws changes of all kinds in quick succession, often with a fault between two steps."""
    changes = replace(mix, changes=(*CHANGES, "drain"))
    later_s = random.choice((0.02, 0.2, 0.6, 1.5)) * (0.5 + random.random())
    operations = [
        operation
        for index in range(random.choice((2, 3, 4)))
        for operation in draw_operations(random, changes, at + index * later_s)
    ]
    if random.random() < 0.4:
        return Moment([], operations)
    kinds = random.choice((LEADERS, ENDS, LOSSES))
    fault = Fault(
        random.choice(mix.among(kinds)),
        at + later_s * random.random(),
        random.randrange(12),
        draw_time(random),
        AtMessage(random.choice((*STEPS, *CHANGE)), random.choice((1, 2, 4))),
        changing=random.random() < 0.5,
    )
    return Moment([fault], operations)


def _draw_without_storage(random: Random, mix: Mix, at: float) -> Moment:
    """Draws changes that cannot be stored at first: Ray's GCS is away before they are requested,
    often until they fail. Then a leader may be lost."""
    time_s = _GCS_TIMEOUT_S * random.choice((0.3, 1.0, 2.5, 3.5)) * (0.7 + 0.6 * random.random())
    kind = mix.among(("gcs-away",))[0]
    faults = [Fault(kind, at - 0.5 * random.random(), random.randrange(12), time_s)]
    operations = draw_operations(random, mix, at)
    if random.random() < 0.4:
        lost_at = at + time_s * random.choice((0.5, 1.0)) + random.random()
        loss, after = draw_loss_of_leader(random, mix, lost_at)
        return Moment([*faults, replace(loss, trigger=None)], [*operations, *after])
    return Moment(faults, operations)


def _draw_flap(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a link that fails repeatedly, while requests are sent over it."""
    kind = mix.among(("flap",))[0]
    first, time_s = random.randrange(12), random.choice((2.0, 4.0)) * (0.5 + random.random())
    faults = [
        Fault(kind, at + index * random.choice((0.5, 1.1)), first, time_s)
        for index in range(random.choice((1, 2, 3)))
    ]
    operations = draw_operations(random, mix, at) if random.random() < 0.5 else []
    return Moment(faults, operations, [fault.at for fault in faults])


def _draw_turns(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a change while some hosts are cut off, and then a loss of its leader while other hosts
    are cut off: they do not hear of the successor in time."""
    kind = random.choice(mix.among(("cut-pair", "cut-pair", "half-cut-pair", "cut")))
    first_s = random.choice((1.0, 3.0, 6.0)) * (0.5 + random.random())
    loss = draw_loss_of_leader(random, mix, at + first_s * (0.7 + 0.4 * random.random()))[0]
    then_s = random.choice((2.0, 4.0, 8.0)) * (0.5 + random.random())
    faults = [
        Fault(kind, at, random.randrange(12), first_s),
        replace(loss, trigger=loss.trigger if random.random() < 0.3 else None),
        Fault(kind, loss.at - 0.1 * random.random(), random.randrange(12), then_s),
    ]
    return Moment(faults, draw_operations(random, mix, at + 0.5 * random.random()))


def _draw_slow_steps(random: Random, mix: Mix, at: float) -> Moment:
    """Draws changes whose steps take long, because calls through Ray are slow, and a fault between
    two steps."""
    kind = mix.among(("slow-calls",))[0]
    time_s = random.choice((4.0, 8.0, 16.0)) * (0.5 + random.random())
    faults = [Fault(kind, at - 0.5 * random.random(), random.randrange(12), time_s)]
    operations = draw_operations(random, mix, at)
    if random.random() < 0.65:
        loss, after = draw_loss_of_leader(random, mix, at + 0.5 * time_s * random.random())
        return Moment([*faults, loss], [*operations, *after])
    hit_at = at + 0.5 * time_s * random.random()
    hit = Fault(random.choice(mix.among(ENDS)), hit_at, random.randrange(12), draw_time(random))
    return Moment([*faults, replace(hit, changing=random.random() < 0.5)], operations)


def _draw_notice(random: Random, mix: Mix, at: float) -> Moment:
    """Draws hosts that will be taken away, or stay after all, while engines change."""
    mix = random.choice((mix, replace(mix, changes=CHANGES)))
    kind = mix.among(("drain-host",))[0]
    first, time_s = random.randrange(12), random.choice((8.0, 16.0, 30.0)) * (0.5 + random.random())
    faults = [
        Fault(kind, at + index * random.random(), first + index, time_s)
        for index in range(random.choice((1, 1, 2)))
    ]
    later_s = random.choice((0.05, 1.0, 3.0)) * (0.5 + random.random())
    if random.random() < 0.5:
        return Moment(faults, draw_operations(random, mix, at + later_s))
    loss, after = draw_loss_of_leader(random, mix, at + later_s)
    return Moment([*faults, loss], after)


def _draw_succession(random: Random, mix: Mix, at: float) -> Moment:
    """Draws versions that follow each other quickly while engines of earlier ones are lost: answers
    need versions that no engine runs any more. The last one is often deployed, and often when an
    engine has been lost. Engines that share experts are never upgraded: they have a late group."""
    if mix.expert:
        return _draw_late_group(random, mix, at)
    pause_s = random.choice((0.2, 0.4, 0.8)) * (0.5 + random.random())
    numbers = (5, 8, 10, 12) if mix.is_busy else (3, 5, 6, 7)
    number, first = random.choice(numbers), random.randrange(_NUM_WEIGHTS)
    operations = [
        Operation(
            at + index * pause_s,
            random.choice(("upgrade", "update_weights", "update_weights")),
            (first + index) % _NUM_WEIGHTS,
        )
        for index in range(number)
    ]
    if random.random() < 0.7:
        is_early, trigger = random.random() < 0.4, AtMessage("remove_failed", 1)
        last = replace(operations[-1], kind="redeploy", trigger=None if is_early else trigger)
        operations[-1] = replace(last, at=last.at if is_early else at + 0.4 * number * pause_s)
    kinds = [random.choice(mix.among(ENDS)) for _ in range(random.choice((1, 2, 3)))]
    faults = [
        Fault(
            kind,
            at + number * pause_s * random.uniform(0.4, 1.2),
            random.randrange(12),
            draw_time(random),
            changing=random.random() < 0.7,
        )
        for kind in kinds
    ]
    return Moment(faults, operations)


_MOMENTS: tuple[tuple[tuple[int, int], Callable[[Random, Mix, float], Moment]], ...] = (
    ((4, 1), _draw_trouble),
    ((5, 1), _draw_change),
    ((7, 8), _draw_both),
    ((3, 8), _draw_reversal),
    ((6, 8), _draw_late_group),
    ((5, 10), _draw_leaderless),
    ((5, 8), _draw_flurry),
    ((2, 1), _draw_without_storage),
    ((3, 2), _draw_flap),
    ((4, 5), _draw_notice),
    ((2, 2), _draw_turns),
    ((4, 4), _draw_slow_steps),
    ((5, 8), _draw_succession),
)
"""The moments with their weights, in usual and in busy campaigns."""


assert len(HOSTS) > 2, "a partial cut leaves a way through a third host"
