"""Random calls and messages: the coordinator does not fail, and its state stays consistent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.coordinator.wave_protocol.null_waves import NullCoordinator
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.coordinator.wire import Broken, EngineReport, Joined, Paused, Repaired
from tests.coordinator.test_state_machine import CONFIG, member

_RANKS = range(4)
_SILENCE_S = 2 * CONFIG.stall_timeout_s
_LOOKS_PER_S = 4


class Driver:
    """Engines and a manager that act randomly, also for ranks that do not exist."""

    def __init__(self, *, lockstep: bool) -> None:
        waves = WaveCoordinator() if lockstep else NullCoordinator()
        self.machine = CoordinatorStateMachine(CONFIG, waves, 0.0)
        self.now, self.incarnation = 0.0, 0
        self.incarnations: dict[int, int] = {}

    def join(self, ranks: set[int], _number: int) -> None:
        taken = {*self.machine.roster.ranks, *self.machine.joining}
        newcomers = []
        for rank in sorted(ranks - taken):
            self.incarnation += 1
            self.incarnations[rank] = self.incarnation
            newcomers.append(member(rank, self.incarnation))
        self.machine.join(newcomers, self.now)

    def leave(self, ranks: set[int], _number: int) -> None:
        self.machine.leave(ranks, self.now)

    def cancel_leave(self, ranks: set[int], _number: int) -> None:
        self.machine.cancel_leave(ranks, self.now)

    def detach(self, ranks: set[int], _number: int) -> None:
        self.machine.detach(ranks, self.now)

    def remove_failed(self, ranks: set[int], _number: int) -> None:
        self.machine.remove_failed(ranks, self.now)

    def pause(self, _ranks: set[int], number: int) -> None:
        (self.machine.pause if number % 2 else self.machine.resume)(self.now)

    def tick(self, speaking: set[int], number: int) -> None:
        """All engines except `speaking` are silent long enough to be found, perhaps several at
        once."""
        for _ in range(int(_SILENCE_S * _LOOKS_PER_S)):
            self.now += 1.0 / _LOOKS_PER_S
            self.report(speaking, number)
            self.machine.tick(self.now)

    def report(self, ranks: set[int], number: int) -> None:
        phase, epoch = [*Phase][number % len(Phase)], self.machine.waves.epoch
        self._send(ranks, EngineReport(0, epoch=epoch, repairs=number, wave_phase=phase))

    def joined(self, _ranks: set[int], _number: int) -> None:
        self._send({*self.machine.waves.ranks}, Joined(0, 0, self.machine.waves.epoch))

    def paused(self, _ranks: set[int], _number: int) -> None:
        waves = self.machine.waves
        number = getattr(waves, "pause_number", 0)
        self._send({*waves.ranks}, Paused(0, 0, waves.epoch, number))

    def broken(self, ranks: set[int], number: int) -> None:
        epoch = self.machine.waves.epoch
        self._send(ranks, Broken(0, 0, epoch, "a worker died", repairing=number % 2 == 1))

    def repaired(self, ranks: set[int], number: int) -> None:
        self._send(ranks, Repaired(0, 0, ("h", number)))

    def _send(self, ranks: set[int], message: msgspec.Struct) -> None:
        for rank in sorted(ranks & self.incarnations.keys()):
            own = msgspec.structs.replace(message, rank=rank, incarnation=self.incarnations[rank])
            self.machine.on_message(own, self.now)

    def check(self, epoch: int) -> None:
        machine = self.machine
        known = {*machine.roster.ranks, *machine.joining}
        assert machine.roster.epoch >= epoch
        assert {*machine.waves.target_ranks} <= known, "it is to form a group with nobody"
        assert machine.detached <= {*machine.roster.ranks}
        present = {member.incarnation for member in machine.roster.members}
        assert present.isdisjoint(machine.roster.left)


_CALLS: list[Callable[[Driver, set[int], int], None]] = [
    Driver.join,
    Driver.leave,
    Driver.cancel_leave,
    Driver.detach,
    Driver.remove_failed,
    Driver.pause,
    Driver.tick,
    Driver.report,
    Driver.joined,
    Driver.paused,
    Driver.broken,
    Driver.repaired,
]
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(_CALLS),
        st.sets(st.sampled_from([*_RANKS]), max_size=2),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=30,
)


@pytest.mark.parametrize("lockstep", [False, True])
@given(steps=_STEPS)
def test_no_order_of_events_crashes_the_coordinator(
    lockstep: bool, steps: list[tuple[Callable[[Driver, set[int], int], None], set[int], int]]
) -> None:
    driver = Driver(lockstep=lockstep)
    driver.join({0, 1, 2}, 0)
    driver.joined(set(), 0)
    for call, ranks, number in steps:
        epoch = driver.machine.roster.epoch
        call(driver, ranks, number)
        driver.check(epoch)
