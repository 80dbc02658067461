"""The head of Ray does not reach the coordinator's host, and starts another coordinator. An engine
that reaches the earlier one follows it until it is silent."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, Fault, Operation, Scenario

_CUT_AT_S, _CUT_S = 4.0, 20.0
_PAIR = 2
"""The target of a cut between the first and the last host."""


def test_an_engine_leaves_although_it_follows_an_earlier_coordinator() -> None:
    """The newest coordinator does not know that the engine is idle, so it leaves at the end of its
    drain time."""
    cut = Fault("cut-pair", _CUT_AT_S, target=_PAIR, time_s=_CUT_S)
    drain = Operation(_CUT_AT_S + _CUT_S + 1.0, "drain", 1)
    scenario = Scenario(0, 2, 1, False, (), (cut,), (drain,), control_host=HOSTS[2])
    run = Run(scenario)
    plane, followed = run.plane, list[bool]()

    def on_leave(ranks: list[int]) -> None:
        for engine in plane.living_engines:
            if engine.rank in ranks and engine.server is not None and plane.coordinator is not None:
                address = engine.server._coordinator_client._address
                followed.append(address != plane.coordinator.address)

    plane.on_leave.append(on_leave)
    assert run.judge().broken == []
    assert len(plane.coordinators) == 2 and followed[0]
