"""Random schedules in which something goes wrong while the cluster recovers from something else.

A campaign consists of a few moments (`moments.py`). Most campaigns have only a few kinds of faults
and changes, so that these meet often: a mixture of all kinds seldom repeats one of them while it
still has effects. Meanwhile several ingresses have long answers, of several versions.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulator.draws.faults import draw_time
from tests.simulator.draws.kinds import BUSY_CHANGES, CHANGES, OF_KIND, SELDOM, Mix
from tests.simulator.draws.moments import draw_moment
from tests.simulator.draws.pressures import (
    draw_growths,
    draw_late_groups,
    draw_needed_versions,
)
from tests.simulator.draws.successions import draw_succession
from tests.simulator.model import POISON_SEED, VOCAB_SIZE
from tests.simulator.scenario import (
    FAST_STEP_S,
    HOSTS,
    IMPATIENT_S,
    PATIENT_S,
    SLOW_STEP_S,
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
_SUCCESSION_SHARE = 0.2
"""The share of campaigns with a long succession of versions or managers."""
_PRESSURE_SHARE = 0.35
"""The share of campaigns that a pressure replaces in most parts."""
_GROWTH_SHARE = 0.08
"""The share of campaigns that repeated changes of the number of engines replace in most parts."""
_POISON_SHARE = 0.05
_CROWD, _CROWD_S = 5, 0.2
"""The greatest number of requests of a crowd, and the time within which they arrive."""
_MAX_CROWDED = 20
"""The greatest number of requests of all crowds: more would wait for each other."""
_TIGHT_SHARE, _FULL_SHARE = 0.35, 0.6
"""The share of campaigns with little room, and the share of these in which the engines fill it from
the beginning. The others have `_TIGHT_ROOMS`."""
_ROOM = 3
_ROOMS = ((1, 2, 3), (2, 2, 2), (1, 3, 2), (0, 3, 3))
"""Engines that fit on each host. At least `_ROOM` fit without any one host except the first."""
_TIGHT_ROOMS = ((1, 1, 1), (0, 2, 1), (0, 1, 2), (1, 2, 1))
"""Rooms for `_ROOM` engines or one more, as long as no host is lost."""
_SLOW_LOADS_S = (0.0, 0.0, 2.0, 6.0)
_MOVE_LOADS_S = (0.0, 2.0, 6.0, 6.0)
"""Additional loading times of later engines, in most campaigns and in those that take hosts away:
a replacement is often not ready before its host stays after all."""


def draw_campaign(
    random: Random, scenario: Scenario, kinds: tuple[str, ...], *, is_busy: bool = False
) -> Scenario:
    """Draws a campaign from a scenario. `kinds`: the kinds of faults. `is_busy`: with more
    ingresses and moments, and more upgrades, repairs, cancelled changes and losses of leaders."""
    mix = _draw_mix(random, kinds, expert=scenario.expert, is_busy=is_busy)
    focus = random.choice((None, None, random.randrange(12)))
    pause_s = random.choice(_PAUSES_S)
    faults: list[Fault] = []
    operations: list[Operation] = []
    moments: list[float] = []
    crowds: list[float] = []
    at = _BEGIN_S + random.random()
    for _ in range(random.choice((2, 3, 3, 4) if is_busy else (1, 2, 2, 3, 3, 4))):
        moments.append(at)
        moment = draw_moment(random, mix, at)
        faults += moment.faults
        operations += moment.operations
        crowds += moment.crowds
        at += pause_s * (0.5 + random.random())
    further = Random(f"succession:{scenario.seed}")
    if further.random() < _SUCCESSION_SHARE:
        moment = draw_succession(further, mix, further.choice((*moments, at)))
        faults += moment.faults
        operations += moment.operations
    if focus is not None:
        faults = [replace(each, target=focus) for each in faults]
    seldom = [kind for kind in SELDOM if kind in kinds] if is_busy else []
    for kind in random.sample(seldom, min(2, len(seldom))):
        seldom_at, target = random.uniform(_BEGIN_S, at), random.randrange(12)
        faults.append(Fault(kind, seldom_at, target, draw_time(random)))
    ingresses = random.choice((2, 2, 3, 3, 3) if is_busy else (1, 2, 2, 2, 3, 3))
    until_s = at + _ARRIVALS_S
    arrivals = [
        random.choice(moments) + random.uniform(-0.3, 1.0)
        if random.random() < 0.5
        else random.uniform(_BEGIN_S, until_s)
        for _ in range(random.randint(4, 16))
    ]
    requests = [_draw_request(random, ingresses, arrival) for arrival in arrivals]
    requests += _draw_crowds(random, ingresses, crowds)
    if random.random() < _POISON_SHARE:
        requests[0] = replace(requests[0], seed=POISON_SEED, gives_up_after=None)
        if random.random() < 0.5:  # no other faults
            faults = []
    may_be_tight = all(fault.kind != "lose-host-for-good" for fault in faults)
    is_tight = may_be_tight and random.random() < _TIGHT_SHARE
    rooms = random.choice(_TIGHT_ROOMS if is_tight else _ROOMS)
    engines = random.choice((1, 2, 2, 3, 3))
    if is_tight and random.random() < _FULL_SHARE:
        rooms = _draw_full_rooms(random, engines)
    moves = any(fault.kind == "drain-host" for fault in faults)
    campaign = replace(
        scenario,
        engines=engines,
        ingresses=ingresses,
        requests=tuple(sorted(requests, key=lambda request: request.at)),
        faults=tuple(faults),
        operations=_fitting(operations, _ROOM if not may_be_tight else sum(rooms)),
        step_s=random.choice((FAST_STEP_S, SLOW_STEP_S, SLOW_STEP_S)),
        autoscaled=scenario.autoscaled and random.random() < 0.5,
        rooms=rooms,
        slow_load_s=random.choice(_MOVE_LOADS_S if moves else _SLOW_LOADS_S),
        no_engine_timeout_s=random.choice((PATIENT_S, PATIENT_S, IMPATIENT_S)),
    )
    growth = Random(f"growth:{scenario.seed}")
    if growth.random() < _GROWTH_SHARE:
        return draw_growths(growth, campaign, mix)
    pressure = Random(f"pressure:{scenario.seed}")
    if pressure.random() >= _PRESSURE_SHARE:
        return campaign
    draw_pressure = draw_late_groups if mix.expert else draw_needed_versions
    return draw_pressure(pressure, campaign, mix)


def _draw_mix(random: Random, kinds: tuple[str, ...], *, expert: bool, is_busy: bool) -> Mix:
    """Draws the common kinds of faults and changes: few, so that they meet often, or all."""
    weighted = [*kinds, *(each for each in OF_KIND if each in kinds)]
    number = random.choice((1, 2, 2, 3, len(weighted)))
    common = random.sample(weighted, min(number, len(weighted)))
    among = BUSY_CHANGES if is_busy else CHANGES
    changes = random.sample(among, random.choice((1, 1, 2, len(among))))
    return Mix(tuple(dict.fromkeys(common)), kinds, tuple(changes), expert, is_busy)


def _draw_full_rooms(random: Random, engines: int) -> tuple[int, int, int]:
    """Draws rooms for exactly this number of engines."""
    hosts = [random.randrange(len(HOSTS)) for _ in range(engines)]
    return hosts.count(0), hosts.count(1), hosts.count(2)


def _fitting(operations: list[Operation], room: int) -> tuple[Operation, ...]:
    """Sorts operations by time, and limits the number of engines to those that fit."""
    operations = [
        replace(each, argument=min(each.argument, room)) if each.kind == "scale" else each
        for each in operations
    ]
    return tuple(sorted(operations, key=lambda operation: operation.at))


def _draw_crowds(random: Random, ingresses: int, begun: list[float]) -> list[Request]:
    """Draws requests for short answers. Several arrive soon after each of these times."""
    arrivals = [
        at + _CROWD_S * random.random() for at in begun for _ in range(random.randint(2, _CROWD))
    ]
    drawn = [_draw_request(random, ingresses, at) for at in arrivals[:_MAX_CROWDED]]
    return [replace(each, max_tokens=random.randint(1, 24)) for each in drawn]


def _draw_request(random: Random, ingresses: int, at: float) -> Request:
    prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24)))
    max_tokens = random.choice((random.randint(1, 24), random.randint(50, 300)))
    gives_up_after = random.randint(1, 30) if random.random() < 0.1 else None
    ingress = random.randrange(ingresses)
    return Request(at, ingress, prompt, max_tokens, random.randrange(9), gives_up_after)
