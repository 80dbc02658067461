"""The simulator finds each planted bug at a known seed. `python -m tests.simulator.plants.hunt`
searches for the first seed of each."""

from __future__ import annotations

import pytest

from tests.simulator.plants.planted import BUGS, find

SEEDS = {
    "manager: a growth that fails returns to a size that was never reached": 8510100,
    "ingress: replies are not read": 6,
    "ingress: aborts are lost": 16,
    "ingress: unreachable engines are ready": 57,
    "ingress: who waits for a silent coordinator gets requests": 8,
    "ingress: what it needs is not said": 0,
    "engine: a heartbeat reports no load": 2,
    "coordinator: epochs begin anew": 13,
    "coordinator: a new ingress gets no view": 0,
    "manager: what it placed is an orphan": 0,
    "manager: what could not be ended is left": 185,
    "manager: requests are not saved": 73995000153,
    "ingress: a gap is not noticed": 9,
    "ingress: outputs are forgotten": 8,
    "ingress: lost engines keep requests": 2,
    "ingress: a journey has no end": 0,
    "ingress: outputs of an earlier attempt count": 0,
    "ingress: engines that are not reached get requests": 32,
    "engine: aborts are ignored": 16,
    "engine: silent clients are kept": 13,
    "engine: lost clients keep requests": 39,
    "engine: it does not say what it computes": 2,
    "coordinator: nobody stalls": 0,
    "coordinator: an engine that is kept goes on leaving": 0,
    "coordinator: who was asked to leave counts as lost": 0,
    "coordinator: it knows the versions of one ingress only": 0,
    "coordinator: a recovery begins no epoch": 73995000025,
    "coordinator: whose repair is not heard of stays out": 81000006,
    "coordinator: time in which it was stopped counts as silence": 73995000166,
    "coordinator: an engine that comes late has the epoch of the others": 0,
    "manager: a start that failed counts for ever": 73995000019,
    "manager: one that was replaced leads on": 73995000066,
    "coordinator: a message of an earlier engine counts as one of its successor": 81000069,
    "coordinator: it keeps any state of a manager": 4,
    "coordinator: an engine that is repaired leaves no longer": 73995000000,
    "manager: a start that is cancelled goes on": 73995000004,
    "ingress: it does not hear what engines begin": 73995000011,
    "engine: a change of its load is none": 73995000002,
    "manager: what is left is the target": 4,
    "manager: the dead are not replaced": 2,
    "manager: a death is not noticed": 7,
    "manager: a drain is over at once": 188,
    "manager: a pause is forgotten": 49,
    "manager: an engine that is kept goes on leaving": 0,
    "ingress: an answer continues on any version": 0,
    "manager: a version that is needed is not made again": 0,
    "manager: nothing gives way to a version that is needed": 8,
    "manager: a version that does not load is not rolled back": 0,
    "engine: it keeps its weights": 0,
    "manager: an engine that gets weights is forgotten": 0,
    "coordinator: an engine that is kept while it is repaired leaves": 50,
    "coordinator: an ingress that is gone stays subscribed": 1,
    "manager: an engine that is kept leaves again": 73995000008,
    "manager: an engine whose host stays moves on": 73995000015,
    "manager: an idle engine does not leave": 73995000004,
    "manager: the status has workers that were replaced": 73995000005,
    "ingress: it ignores that a client gives up": 1,
    "ingress: a request waits for an engine without limit": 84000105,
    "coordinator: an engine that is kept is detached": 0,
    "coordinator: a dead engine takes its successor along": 34,
    "manager: a version in use is forgotten": 73995000128,
    "manager: its successor does not know that a drain is by name": 73995000240,
    "manager: its successor does not know the drains": 73995000240,
    "manager: a change that fails returns to a version that was given up": 82000010,
    "manager: it takes the claim of a lost manager for its state": 82000032,
    "manager: an engine whose start is cancelled stays in the roster": 73995000018,
    "manager: an engine that leaves by mistake is not kept": 73995000995,
    "manager: what is kept and could not be stored is ignored": 9105008,
    "coordinator: it ignores what an engine keeps of the same term": 9105162,
}
"""For each bug, a seed that finds it."""


@pytest.mark.parametrize(("name", "seed"), SEEDS.items())
def test_a_planted_bug_is_found(name: str, seed: int) -> None:
    """If a seed no longer finds its bug, replace it with another one."""
    assert find(BUGS[name], range(seed, seed + 1)) == seed


def test_every_bug_has_a_seed() -> None:
    assert SEEDS.keys() == BUGS.keys()


def test_every_part_has_a_planted_bug() -> None:
    parts = [name.partition(":")[0] for name in BUGS]
    assert set(parts) == {"ingress", "engine", "coordinator", "manager"} and len(parts) >= 12
