"""An engine leaves and is idle. Then a worker of the only other engine with its version is lost,
and answers continue on the leaving engine: it finishes them, although it counted as idle before."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Request, Scenario

_SECOND = (10, 4, 43, 6, 27, 0, 19, 3, 25, 37, 31, 3, 48, 34, 16, 38, 45, 37)
_THIRD = (34, 36, 10, 45, 21, 48, 33, 47, 31, 47, 18, 27, 3, 45, 29, 22, 4)


def test_a_leaving_engine_finishes_requests_that_move_to_it() -> None:
    trigger = AtMessage("KeepAliveReply", 6)
    scenario = Scenario(
        seed=700590,
        engines=2,
        ingresses=2,
        expert=False,
        requests=(
            Request(3.4459821494866203, 0, (12,), 186, 1),
            Request(5.546989510916298, 0, _SECOND, 9, 5, 10),
            Request(5.6464030334936, 0, _THIRD, 51, 2),
        ),
        faults=(Fault("lose-worker", 4.6385255089009325, 8, 0.08, trigger),),
        operations=(Operation(4.816416937747563, "update_weights", 1),),
        step_s=SLOW_STEP_S,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    assert [line.split()[1] for line in run.faults.happened] == ["lose-worker"]
