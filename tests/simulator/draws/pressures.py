"""Pressures on a whole campaign: states that last long, and that several faults and changes meet.

Engines that share experts try to form groups whose members hang or do not reach each other. Other
engines lack room for a version that long answers need. Both last for longer than one moment of a
campaign. Or the number of engines changes while newcomers are lost.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulator.draws.faults import draw_loss_of_leader, draw_time
from tests.simulator.draws.kinds import ENDS, OBSTACLES, STALL_TIMEOUT_S, Mix
from tests.simulator.scenario import (
    HOSTS,
    PATIENT_S,
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
)

_BEGIN_S = 3.5
_JOINS_S = 2.0
"""The time within which a requested engine has loaded and joins, if it loads as fast as the first
ones."""
_LONG = (20, 250, 300, 300)
"""Numbers of tokens of answers that outlast several versions."""
_NUM_WEIGHTS = 3
_LOST_SHARE = 0.35
"""The share of pressures in which a leader is lost meanwhile."""
_HOST_SHARE = 0.6
"""The share of clusters that cannot grow in which a host is lost."""
_GROWING_SHARE = 0.6
"""The share of repeated changes in which no number of engines is smaller than the one before."""
_LOSSES = (*ENDS, "kill", "kill")


def draw_late_groups(random: Random, scenario: Scenario, mix: Mix) -> Scenario:
    """Draws groups that cannot form: one of their engines hangs or is not reached for longer than
    the coordinator waits, often a second one while it looks for the cause. Each group begins with a
    change or with a lost engine."""
    scales = [each for each in scenario.operations if each.kind == "scale"]
    faults, operations = [*scenario.faults[:2]], scales[:1]
    engines, at = random.choice((2, 2, 3)), _BEGIN_S + random.random()
    for _ in range(random.choice((1, 1, 2))):
        joins_at = at + _JOINS_S * random.random()
        if random.random() < 0.65:
            number = random.choice([n for n in (1, 2, 3, 4) if n != engines])
            operations.append(Operation(at, "scale", number))
        else:
            hit = random.choice(mix.among(("kill", "lose-worker", "lose-worker")))
            faults.append(Fault(hit, at, random.randrange(12), draw_time(random)))
        for _ in range(random.choice((1, 1, 2))):
            faults.append(
                Fault(
                    random.choice(mix.among(("hang", "hang", *OBSTACLES))),
                    joins_at,
                    random.randrange(12),
                    STALL_TIMEOUT_S * random.uniform(1.2, 5.0),
                    changing=random.random() < 0.6,
                )
            )
            joins_at += random.choice((0.1, 0.5, 1.0, 1.3)) * STALL_TIMEOUT_S * random.random()
        if random.random() < _LOST_SHARE:
            lost_at = at + STALL_TIMEOUT_S * random.uniform(0.2, 3.0)
            loss, after = draw_loss_of_leader(random, mix, lost_at)
            faults.append(replace(loss, trigger=random.choice((None, loss.trigger))))
            operations += after
        at += STALL_TIMEOUT_S * random.choice((0.3, 1.0, 3.0)) * (0.5 + random.random())
    return replace(
        scenario,
        engines=engines,
        faults=_with_returning_hosts(faults),
        operations=_sorted(operations),
        autoscaled=False,
        rooms=random.choice(((1, 2, 3), (2, 2, 2), (1, 1, 2))),
        slow_load_s=random.choice((0.0, 0.0, 2.0)),
        no_engine_timeout_s=PATIENT_S,
    )


def draw_needed_versions(random: Random, scenario: Scenario, mix: Mix) -> Scenario:
    """Draws versions that follow each other while long answers stream, on hosts with little room.
    Engines of earlier versions are lost: their answers need them again."""
    engines, pause_s = random.choice((1, 2, 3, 3)), random.choice((0.5, 2.0, 4.0, 6.0))
    rooms = [0, 0, 0]
    for _ in range(engines + random.choice((0, 0, 0, 0, 1))):
        rooms[random.randrange(len(HOSTS))] += 1
    operations, at = list[Operation](), _BEGIN_S + random.random()
    weights = 0
    for _ in range(random.choice((1, 2, 2, 3, 4))):
        weights = random.choice([each for each in range(_NUM_WEIGHTS) if each != weights])
        kind = random.choice(("upgrade", "update_weights", "update_weights", "redeploy"))
        operations.append(Operation(at, kind, weights))
        at += pause_s * (0.5 + random.random())
    if random.random() < 0.3:
        operations.append(Operation(random.uniform(_BEGIN_S, at), "scale", random.randint(1, 3)))
    faults = [*scenario.faults[: random.randint(0, 1)]]
    hit_at = random.choice(operations[:2]).at
    for _ in range(random.choice((1, 2, 3, 4, 5))):
        kind = random.choice(mix.among(_LOSSES))
        hit_at += random.choice((0.2, 1.0, 3.0)) * (0.5 + random.random())
        trigger = AtMessage(random.choice(("remove_failed", "start", "leave", "detach")), 1)
        faults.append(
            Fault(
                kind,
                hit_at,
                random.randrange(12),
                draw_time(random),
                trigger if random.random() < 0.3 else None,
                changing=random.random() < 0.4,
            )
        )
    if random.random() < _LOST_SHARE:
        loss, after = draw_loss_of_leader(random, mix, random.uniform(_BEGIN_S, at + 2.0))
        faults.append(loss)
        operations += after
    is_autoscaled = random.random() < 0.4
    if not is_autoscaled and random.random() < _HOST_SHARE:
        # One more engine fits, of the new version. Then the room of a host is lost.
        rooms = [0, *random.choice(((1, 1), (1, 2), (2, 1), (2, 2)))]
        engines, lost_at = sum(rooms) - 1, operations[0].at + random.uniform(1.0, 7.0)
        operations = operations[: random.randint(1, 2)]
        if operations[-1].kind == "pause":  # its end is cut off
            operations.pop()
        time_s = STALL_TIMEOUT_S * random.uniform(1.0, 4.0)
        [kind] = mix.among(("lose-host",))[:1]
        faults = [*faults[:2], Fault(kind, lost_at, random.randrange(12), time_s)]
    requests = [
        Request(
            random.choice(operations).at - random.uniform(-0.5, 1.0),
            random.randrange(scenario.ingresses),
            (index,),
            random.choice(_LONG),
            random.randrange(9),
        )
        for index in range(random.choice((3, 6, 10)))
    ]
    return replace(
        scenario,
        engines=engines,
        requests=tuple(sorted(requests, key=lambda request: request.at)),
        faults=_with_returning_hosts(faults),
        operations=_sorted(operations),
        step_s=random.choice((1.0, 2.0)) * SLOW_STEP_S,
        autoscaled=is_autoscaled,
        rooms=(rooms[0], rooms[1], rooms[2]),
        slow_load_s=random.choice((0.0, 0.0, 2.0)),
        no_engine_timeout_s=PATIENT_S,
    )


def draw_growths(random: Random, scenario: Scenario, mix: Mix) -> Scenario:
    """Draws changes of the number of engines that follow each other while engines load, and lost
    newcomers: several requested growths fail, and a manager may fall back from any of them."""
    faults, operations = [*scenario.faults[: random.randint(0, 1)]], list[Operation]()
    at, numbers = _BEGIN_S + random.random(), [random.randint(1, 4) for _ in range(4)]
    if random.random() < _GROWING_SHARE:
        numbers.sort()
    for number in numbers[: random.choice((2, 2, 3, 4))]:
        operations.append(Operation(at, "scale", number))
        lost = random.choice(mix.among(("kill", "kill", "lose-worker")))
        hit_at = at + _JOINS_S * random.random()
        for target in range(random.choice((0, 1, 2, 4))):
            faults.append(Fault(lost, hit_at, target, draw_time(random), changing=True))
            hit_at += random.choice((0.0, 0.1, 0.5)) * random.random()
        at += random.choice((0.3, 1.0, 1.0, 5.0)) * (0.5 + random.random())
    if random.random() < _LOST_SHARE:
        loss, after = draw_loss_of_leader(random, mix, random.uniform(_BEGIN_S, at + 2.0))
        faults.append(loss)
        operations += after
    return replace(
        scenario,
        engines=random.choice((1, 1, 1, 2)),
        faults=_with_returning_hosts(faults),
        operations=_sorted(operations),
        autoscaled=False,
        rooms=random.choice(((2, 3, 3), (2, 2, 2), (1, 1, 2))),
        slow_load_s=random.choice((0.0, 2.0, 2.0, 6.0)),
    )


def _with_returning_hosts(faults: list[Fault]) -> tuple[Fault, ...]:
    """Makes each lost host come back: the other hosts may not have room for the target number of
    engines."""
    return tuple(
        replace(fault, kind="lose-host") if fault.kind == "lose-host-for-good" else fault
        for fault in faults
    )


def _sorted(operations: list[Operation]) -> tuple[Operation, ...]:
    return tuple(sorted(operations, key=lambda operation: operation.at))
