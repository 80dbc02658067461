"""When an engine that shares experts continues on its own; the clock is scripted."""

from __future__ import annotations

import pytest

from swell.configs.schema import ClusterConfig
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.engine.serving.standalone_monitor import StandaloneMonitor

LIMIT_S = 4.0
TURN_S = 0.5
CONFIG = ClusterConfig(stall_timeout_s=LIMIT_S)


class Loop:
    """An engine's loop, which runs twice a second."""

    def __init__(self, config: ClusterConfig = CONFIG) -> None:
        self.now = 100.0
        self.monitor = StandaloneMonitor(config, self.now)

    def turns(
        self,
        time_s: float,
        phase: Phase = Phase.RUNNING,
        *,
        progresses: bool = False,
        heard: bool = False,
        may_serve: bool = True,
        turn_s: float = TURN_S,
    ) -> list[float]:
        """Returns the times at which the monitor decided that the engine should continue on its
        own."""
        due = []
        for _ in range(round(time_s / turn_s)):
            self.now += turn_s
            if heard:
                self.monitor.on_command(self.now)
            progress = round(self.now / turn_s) if progresses else 0
            if self.monitor.check(phase, 1, progress, self.now, may_serve=may_serve):
                due.append(self.now)
        return due


def test_a_step_that_hangs_without_a_coordinator_is_abandoned_after_the_limit() -> None:
    loop = Loop()
    loop.turns(10.0, progresses=True, heard=True)
    begun = loop.now
    assert loop.turns(LIMIT_S) == []
    assert loop.turns(3 * TURN_S)[0] <= begun + LIMIT_S + 2 * TURN_S


def test_a_failed_attempt_to_serve_standalone_is_repeated() -> None:
    loop = Loop()
    assert len(loop.turns(4 * LIMIT_S)) == 3


def test_with_a_coordinator_an_engine_never_serves_standalone() -> None:
    assert Loop().turns(10 * LIMIT_S, heard=True) == []
    assert Loop().turns(10 * LIMIT_S, Phase.OUT, heard=True) == []


def test_an_engine_of_a_stepping_group_stays_in_it() -> None:
    assert Loop().turns(10 * LIMIT_S, progresses=True) == []


def test_a_pause_without_a_coordinator_is_left() -> None:
    assert Loop().turns(2 * LIMIT_S, Phase.PAUSED)


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.STANDALONE])
def test_an_engine_without_work_stays_in_its_group(phase: Phase) -> None:
    assert Loop().turns(10 * LIMIT_S, phase) == []


def test_an_engine_whose_group_broke_during_the_silence_serves_soon() -> None:
    loop = Loop()
    loop.turns(2 * LIMIT_S, Phase.STOPPED)
    begun = loop.now
    assert loop.turns(LIMIT_S, Phase.OUT)[0] <= begun + LIMIT_S / 4 + 2 * TURN_S


def test_a_paused_or_excluded_engine_never_serves_standalone() -> None:
    assert Loop().turns(10 * LIMIT_S, may_serve=False) == []
    assert Loop().turns(10 * LIMIT_S, Phase.OUT, may_serve=False) == []


def test_an_engine_without_room_for_all_experts_never_serves_standalone() -> None:
    config = ClusterConfig(stall_timeout_s=LIMIT_S, min_engines=2)
    assert Loop(config).turns(10 * LIMIT_S) == []


def test_an_engine_that_was_stopped_listens_first() -> None:
    loop = Loop()
    loop.turns(2.0, heard=True)
    assert loop.turns(100.0, turn_s=100.0) == []
    assert loop.turns(LIMIT_S, heard=True) == []
