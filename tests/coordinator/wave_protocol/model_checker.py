"""Explores all interleavings of waves, group changes and failures, within bounds.

    python -m tests.coordinator.wave_protocol.model_checker [--large]

prints the number of states for each of the bounds. From every state, owed moves by themselves must
be able to reach a quiescent state. So nothing waits for an optional event, and every cycle has an
exit.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator, WaveMember
from tests.coordinator.wave_protocol.model import Model
from tests.coordinator.wave_protocol.model_state import Bounds, State, Transition, Violation
from tests.coordinator.wave_protocol.model_transitions import check, is_quiescent, moves

_LONG = 5000


@dataclass(frozen=True)
class Explored:
    states: int
    moves: int
    most_quiet: int
    """The largest number of steps without rows or votes at the end of a wave."""


class _Graph:
    """The states in order of discovery, the move that first reached each, and the owed moves."""

    def __init__(self, first: State) -> None:
        self.states = [first]
        self.number = {first: 0}
        self.parent = array("i", [-1])
        self.names = [""]
        self.owed_from, self.owed_to = array("i"), array("i")

    def add(self, parent: int, name: str, owed: bool, state: State) -> None:
        number = self.number.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parent.append(parent)
            self.names.append(name)
        if owed:
            self.owed_from.append(parent)
            self.owed_to.append(number)

    def trace(self, number: int) -> str:
        names = []
        while number > 0:
            names.append(self.names[number])
            number = self.parent[number]
        return "\n  ".join(reversed(names))

    def non_quiescent(self, bounds: Bounds) -> int | None:
        """Returns the first state from which owed moves cannot reach a quiescent state."""
        before: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.owed_from, self.owed_to, strict=True):
            before[target].append(source)
        todo = [number for number, state in enumerate(self.states) if is_quiescent(state, bounds)]
        reached = bytearray(len(self.states))
        for number in todo:
            reached[number] = 1
        while todo:
            for source in before[todo.pop()]:
                if not reached[source]:
                    reached[source] = 1
                    todo.append(source)
        return next((n for n, r in enumerate(reached) if not r), None)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off. It takes a fifth of the time of an exploration, and finds
    nothing: states do not refer to each other."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_garbage_collection()
def explore(
    bounds: Bounds,
    member: type[WaveMember] = WaveMember,
    coordinator: type[WaveCoordinator] = WaveCoordinator,
    limit: int = 3_000_000,
    make_model: type[Model] = Model,
) -> Explored:
    """Visits every state; raises `Violation` with the moves that lead to a bad one."""
    model = make_model(bounds, member, coordinator)
    graph = _Graph(model.first())
    number = taken = 0
    while number < len(graph.states):
        try:
            for name, owed, state in moves(model, graph.states[number]):
                taken += 1
                graph.add(number, name, owed, state)
            check(graph.states[number])
        except Violation as violation:
            raise Violation(f"{violation}, after\n  {graph.trace(number)}") from None
        number += 1
        if number > limit:
            raise Violation(f"more than {limit} states: it does not end")
    non_quiescent = graph.non_quiescent(bounds)
    if non_quiescent is not None:
        raise Violation(
            f"no way to rest, after\n  {graph.trace(non_quiescent)}\n"
            f"in {graph.states[non_quiescent]}"
        )
    return Explored(len(graph.states), taken, model.most_quiet)


class Scenario:
    """One path through the model."""

    def __init__(self, bounds: Bounds) -> None:
        self.model = Model(bounds)
        self.state = self.model.first()
        self.taken: list[str] = []

    def moves(self) -> list[Transition]:
        return list(moves(self.model, self.state))

    def take(self, move: Transition) -> None:
        name, _, self.state = move
        self.taken.append(name)
        check(self.state)

    def perform(self, *names: str) -> Scenario:
        """Performs these moves in order."""
        for name in names:
            possible = {move[0]: move for move in self.moves()}
            assert name in possible, f"after {self.taken}: no {name!r} in {sorted(possible)}"
            self.take(possible[name])
        return self

    def rest(self) -> State:
        """Performs owed moves until none is left; the result must be quiescent."""
        for _ in range(_LONG):
            owed = [move for move in self.moves() if move[1]]
            if not owed:
                break
            self.take(owed[0])
        assert is_quiescent(self.state, self.model.bounds), (
            f"no rest after {self.taken}: {self.state}"
        )
        return self.state

    def phases(self) -> list[Phase]:
        return [engine.fields.phase for engine in self.state.engines]


K1, K2, E1, E2, S2 = ("known", 1), ("known", 2), ("eos", 1), ("eos", 2), ("stepwise", 2)
"""Requests: the kind (see `Job.kind`) and the number of steps."""

BOUNDS = {
    "pause": Bounds(2, 1, (K2,), pauses=1),
    "two pauses": Bounds(2, 1, pauses=2),
    "depth 1": Bounds(2, 1, (K2, E1)),
    "depth 2": Bounds(2, 2, (K1, E2)),
    "depth 2, pause": Bounds(2, 2, (K1,), pauses=1),
    "depth 3": Bounds(2, 3, (K1, E1)),
    "stepwise": Bounds(2, 2, (S2, K1)),
    "three requests": Bounds(2, 2, (K1, K1, K1)),
    "three engines": Bounds(3, 2, (E1, K1)),
    "newcomer": Bounds(2, 1, (K1,), newcomers=1),
    "newcomer, pause": Bounds(2, 1, newcomers=1, pauses=1),
    "newcomer, death": Bounds(2, 1, newcomers=1, deaths=1, errors=1),
    "first two, pause": Bounds(0, 1, newcomers=2, pauses=1),
    "detach": Bounds(2, 1, (K1,), detaches=1),
    "detach, death": Bounds(2, 1, detaches=1, deaths=1),
    "exchange": Bounds(1, 1, newcomers=1, detaches=1),
    "death": Bounds(3, 1, (K1,), deaths=1, errors=1),
    "death, depth 2": Bounds(2, 2, (K1,), deaths=1),
    "death, two pauses": Bounds(2, 1, pauses=2, deaths=1),
    "death, four requests": Bounds(2, 1, (K1,) * 4, deaths=1),
    "two deaths": Bounds(2, 1, deaths=2, errors=1),
    "repair": Bounds(2, 1, (K1,), losses=1, errors=1),
    "repair, two requests": Bounds(2, 1, (K1, K1), losses=1),
    "restart": Bounds(2, 1, (K1,), restarts=1, reports=True),
    "restart, pause": Bounds(2, 1, pauses=1, restarts=1, reports=True),
    "restart, newcomers": Bounds(0, 1, newcomers=2, restarts=1, reports=True),
    "restart, detach": Bounds(2, 1, detaches=1, restarts=1, reports=True),
    "restart, death": Bounds(2, 1, (K1,), deaths=1, restarts=1, reports=True),
    "restart, repair": Bounds(2, 1, losses=1, restarts=1, reports=True),
    "drop": Bounds(2, 1, (K1,), drops=1, reports=True),
    "drop, three requests": Bounds(2, 1, (K1,) * 3, drops=1, reports=True),
    "drop, newcomer": Bounds(1, 1, newcomers=1, drops=1, reports=True),
    "drop, death": Bounds(3, 1, deaths=1, drops=1, reports=True, errors=1),
    "alone, restart": Bounds(2, 1, losses=1, restarts=1, reports=True, alones=1),
    "alone, drop": Bounds(3, 1, deaths=1, drops=1, reports=True, errors=1, alones=1),
    "alone, repair": Bounds(2, 1, losses=1, reports=True, errors=1, alones=2),
    "alone, pause": Bounds(2, 1, pauses=1, reports=True, alones=1),
    "alone, newcomer": Bounds(1, 1, newcomers=1, reports=True, alones=2),
    "late reports": Bounds(2, 1, (K1,), reports=True, late_reports=2),
    "captures": Bounds(2, 2, (K2, E1, K1), captures=True),
    "captures, four requests": Bounds(2, 1, (K1,) * 4, captures=True),
    "captures, newcomer": Bounds(2, 1, (K1, K1), newcomers=1, captures=True),
    "captures, detach": Bounds(2, 1, (K1, K1), detaches=1, captures=True),
    "captures, repair": Bounds(2, 1, (K1, K1), losses=1, errors=1, captures=True),
    "captures, restart": Bounds(2, 1, (K1, K1), restarts=1, reports=True, captures=True),
}
"""The bounds that the tests explore: engines, steps in flight, requests and other possible
events."""

LARGE = {
    "stepwise, pause": Bounds(2, 2, (S2, K1), pauses=1),
    "depth 3, pause": Bounds(2, 3, (E1,), pauses=2),
    "three engines, pause": Bounds(3, 2, (K1,), pauses=1),
    "three engines, detach": Bounds(3, 1, (K1,), detaches=1),
    "three engines, repair": Bounds(3, 1, (K1,), losses=1, errors=1),
    "newcomer, death, work": Bounds(2, 1, (K1,), newcomers=1, deaths=1, errors=1),
    "restart, pause, work": Bounds(2, 1, (K1,), pauses=1, restarts=1, reports=True),
    "restart, two pauses": Bounds(2, 1, pauses=2, restarts=1, reports=True),
    "restart, newcomer": Bounds(2, 1, newcomers=1, restarts=1, reports=True),
    "restart, repair, work": Bounds(2, 1, (K1,), losses=1, restarts=1, reports=True, errors=1),
    "alone, restart, pause": Bounds(2, 1, pauses=1, losses=1, restarts=1, reports=True, alones=1),
    "alone, pause, repair": Bounds(2, 1, pauses=1, losses=1, reports=True, errors=1, alones=1),
    "alone, death": Bounds(2, 1, newcomers=1, deaths=1, reports=True, errors=1, alones=2),
    "two restarts": Bounds(2, 1, (K1,), pauses=1, restarts=2, reports=True),
}
"""The bounds that only `--large` explores."""


def main() -> None:
    table = {**BOUNDS, **LARGE} if "--large" in sys.argv else BOUNDS
    names = [a for a in sys.argv[1:] if a in table] or list(table)
    for name in names:
        began = time.perf_counter()
        explored = explore(table[name])
        seconds = time.perf_counter() - began
        print(
            f"{name:24} {explored.states:9,} states {explored.moves:10,} moves {seconds:6.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
