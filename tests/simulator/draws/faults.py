"""Faults, and those that follow from them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulator.draws.kinds import (
    ALIVE,
    CALLS,
    CUTS,
    ENDS,
    GROUP_RECOVERY,
    LEADERS,
    LINKS,
    LOSSES,
    OF_KIND,
    RECOVERY,
    STALL_TIMEOUT_S,
    Mix,
)
from tests.simulator.draws.operations import draw_operations
from tests.simulator.scenario import AtMessage, Fault, Operation

_REPLACED_S = 3.0
"""The approximate time until a process that was lost, or got other weights, has a successor."""
_RESTART_S = 1.0
"""The approximate time until a manager that was lost has a successor."""


def draw_time(random: Random) -> float:
    """Draws a duration: a moment, much longer, or about as long as it takes to be noticed."""
    edge_s = STALL_TIMEOUT_S * random.uniform(0.5, 1.5)
    return random.choice((0.05, 1.0, edge_s, edge_s, 30.0 * (0.5 + random.random())))


def draw_faults(random: Random, mix: Mix, at: float) -> list[Fault]:
    """Draws a fault of a common kind, and often others that follow from it."""
    kind = random.choice([*mix.common, *(each for each in OF_KIND if each in mix.common)])
    if kind in CUTS:
        kind = random.choice([each for each in CUTS if each in mix.possible])
    first = Fault(kind, at, random.randrange(12), draw_time(random))
    faults = [first]
    match random.choice(("once", "again", "pair", "chased", "chased", "weak", "weak")):
        case "again":  # the next fault may hit the successor
            for _ in range(random.randint(1, 3)):
                at += random.choice((0.3, 1.5, 4.0)) * (0.5 + random.random())
                at += first.time_s if random.random() < 0.5 else 0.0
                time_s = random.choice((first.time_s, draw_time(random)))
                same = random.random() < 0.3
                faults.append(replace(first, at=at, time_s=time_s, same=same))
        case "pair":
            faults.append(replace(first, at=at + 0.05 * random.random(), target=first.target + 1))
        case "chased":
            messages: tuple[str, ...] = RECOVERY
            if mix.expert:
                messages += GROUP_RECOVERY
            if kind in OF_KIND and random.random() < 0.6:
                messages = OF_KIND[kind]
            faults.append(draw_aimed(random, mix, at + 0.001, messages))
        case "weak":  # a link fails, then one of its ends before the link has recovered
            kind = random.choice(mix.among(ENDS))
            hit = replace(first, kind=kind, at=at + 1.0 + random.random(), same=True)
            faults = [draw_weak_link(random, mix, at), hit]
    return faults


def draw_weak_link(random: Random, mix: Mix, at: float) -> Fault:
    """Draws a fault of a link that lasts until processes have been replaced, or about until it is
    noticed."""
    kind = random.choice(mix.among(LINKS))
    trigger = AtMessage(random.choice(ALIVE), random.choice((1, 1, 2)))
    replaced_s = _REPLACED_S * random.uniform(1.0, 3.0)
    time_s = random.choice((replaced_s, replaced_s, draw_time(random)))
    return Fault(kind, at, random.randrange(12), time_s, trigger)


def draw_aimed(random: Random, mix: Mix, at: float, messages: tuple[str, ...]) -> Fault:
    """Draws a fault that one of these messages triggers."""
    trigger = AtMessage(random.choice(messages), random.choice((1, 1, 2, 5)))
    kind = random.choice(mix.among(LOSSES))
    return Fault(kind, at, random.randrange(12), draw_time(random), trigger)


def draw_loss_of_leader(random: Random, mix: Mix, at: float) -> tuple[Fault, list[Operation]]:
    """Draws the loss of a manager or coordinator at the next step of a change, and often another
    change that is requested before there is a successor."""
    kind = random.choice(mix.among(LEADERS))
    trigger = AtMessage(random.choice(mix.steps), random.choice((1, 1, 2)))
    loss = Fault(kind, at, random.randrange(12), draw_time(random), trigger)
    if random.random() < 0.4:
        return loss, []
    return loss, draw_operations(random, mix, at + 2.0 * _RESTART_S * random.random())


def draw_failed_calls(random: Random, mix: Mix, at: float) -> list[Fault]:
    """Draws calls through Ray that fail: often the same call again, when it is repeated."""
    call = random.choice((*mix.steps, *mix.steps, *CALLS))
    trigger = AtMessage(call, random.choice((1, 1, 1, 2)))
    first = Fault("fail-call", at, random.randrange(12), trigger=trigger)
    again = [
        replace(first, at=at + 0.001, target=random.randrange(12))
        for _ in range(random.choice((0, 0, 1, 2)))
    ]
    return [first, *again]
