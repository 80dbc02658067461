"""The manager's decisions in every order of events within bounds, and each invariant separately."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from swell.cluster.control.plan import control_state
from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Place
from swell.configs.schema import load
from tests.cluster.control.plan.control_model import Bounds, Violation, explore

BOUNDS = {
    "three requests": Bounds(scales=3),
    "a drain between requests": Bounds(data=2, scales=1, drains=1),
    "failing starts": Bounds(scales=2, failures=1),
    "starts that fail one after the other": Bounds(scales=1, failures=3),
    "deaths and failing starts": Bounds(data=2, scales=1, deaths=1, failures=1),
    "a death between two requests": Bounds(scales=2, deaths=1, failures=1),
    "dying again and again": Bounds(data=1, max_engines=2, scales=1, deaths=3),
    "a manager that is replaced": Bounds(data=2, scales=1, drains=1, pauses=2, take_overs=1),
    "a load that changes its mind": Bounds(loads=1, scales=1, failures=1, max_engines=2),
    "no room": Bounds(scales=2, waits=1, max_engines=2),
    "a load without room": Bounds(loads=1, scales=1, waits=1, max_engines=2),
    "a notice": Bounds(data=2, scales=1, notices=1, max_engines=2),
    "a notice, and no room": Bounds(notices=1, waits=1, take_overs=1, max_engines=2),
    "a notice and a death": Bounds(data=2, notices=1, deaths=1, max_engines=2),
    "a successor and accidents": Bounds(data=2, scales=1, deaths=1, failures=1, take_overs=1),
}


class Rule(NamedTuple):
    """A line of `control_state.py`, a mutation that breaks it, and the bounds within which that
    shows."""

    bounds: str
    line: str
    broken: str


RULES = {
    "what is kept is the smallest size since it was whole": Rule(
        "failing starts",
        "min(change.fallback if under_way else change.target, engines)",
        "engines",
    ),
    "a change that is under way is not whole": Rule(
        "failing starts", "change.fallback if under_way else change.target", "change.target"
    ),
    "a whole cluster is what a failed growth goes back to": Rule(
        "a death between two requests", "stage=ChangeStage.SETTLED, fallback=change.target", ""
    ),
    "only what was requested can fail": Rule(
        "deaths and failing starts", "is_requested and back <", "back <"
    ),
    "engines that serve beside a failure count": Rule(
        "failing starts",
        "max(fleet.num_present, change.fallback)",
        "change.fallback",
    ),
    "a request forgets the back-off": Rule(
        "dying again and again", "change=change, backoff=Backoff())\n\n\ndef drain",
        "change=change)\n\n\ndef drain",
    ),
    "starts wait for the back-off": Rule(
        "dying again and again", "[rank for rank in ranks if not waits[rank]]", "ranks"
    ),
    "the next attempt is planned": Rule(
        "dying again and again",
        "min((wait_s for wait_s in waits.values() if wait_s), default=None)",
        "None",
    ),
    "engines that leave are kept first": Rule(
        "three requests", "missing - len(keep)", "missing"
    ),
    "starts are cancelled before engines leave": Rule(
        "three requests", "surplus > 0 and len(cancel) == len(fleet.starting)", "surplus > 0"
    ),
    "an engine that joins is not cancelled": Rule(
        "three requests", "fleet.can_be_cancelled", "fleet.starting"
    ),
    "an engine that is detached, or was named, is not kept": Rule(
        "a drain between requests",
        "fleet.can_be_kept[",
        "[e.rank for e in fleet.engines if e.intent.value != 'stay'][",
    ),
    "what the load wants is tried until it is there": Rule(
        "a load that changes its mind",
        "change = Change(engines, engines, limits.drain_timeout_s, ChangeStage.REQUESTED)",
        "change = Change(engines, min(state.change.fallback, engines), limits.drain_timeout_s, "
        "ChangeStage.REQUESTED)",
    ),
    "pending means that nothing else is done": Rule(
        "no room", "fleet.starting and fleet.starting == fleet.pending", "fleet.pending"
    ),
    "a pause outlives its manager": Rule(
        "a manager that is replaced",
        "desired.pause_requested if desired.target else is_paused",
        "False",
    ),
    "a target outlives its manager": Rule(
        "a manager that is replaced", "desired.target or state.change.target",
        "state.change.target",
    ),
}  # fmt: skip


def test_a_request_waits_while_all_room_is_reserved() -> None:
    """When the starts begin, they still belong to the requested change."""
    limits = load({"model": {"path": "m"}}).cluster
    state = control_state.initial(load({"model": {"path": "m"}}))
    fleet = FleetView((EngineStatus(0, Place.SERVING),), is_reserved=True)
    state = control_state.scale(state, fleet, 2, limits)
    state, plan = control_state.plan(state, fleet, 0.0)
    assert plan.start == ()
    state, plan = control_state.plan(state, replace(fleet, is_reserved=False), 0.0)
    assert plan.start == (1,) and plan.is_requested


@pytest.mark.parametrize("name", BOUNDS)
def test_every_order_of_events_ends_in_the_last_requested_state(name: str) -> None:
    assert explore(BOUNDS[name]) > 300


@pytest.mark.parametrize("name", RULES)
def test_no_rule_is_superfluous(name: str) -> None:
    rule = RULES[name]
    with pytest.raises(Violation):
        explore(BOUNDS[rule.bounds], _without(rule))


def _without(rule: Rule) -> ModuleType:
    source = inspect.getsource(control_state)
    assert source.count(rule.line) == 1, rule.line
    module = ModuleType("mutated_control_state")
    sys.modules[module.__name__] = module  # for dataclasses
    exec(compile(source.replace(rule.line, rule.broken), "mutated", "exec"), module.__dict__)
    return module
