"""A call that stops an engine arrives after its manager has terminated and another one has adopted
the engine."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.coordinator.manager_state import ManagerId, ManagerState
from tests.simulator.actors import SimEngine, SimManager
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Operation, Request, Scenario

_LATE_S = 3.0
"""How long the call takes: the next manager has adopted the engine before."""


@pytest.mark.parametrize("expert", [False, True])
def test_a_late_stop_does_not_end_an_engine_that_the_next_manager_has_adopted(
    expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager cancels the start of an engine, and is lost before the target is stored or known
    to the coordinator."""
    operations = Operation(3.3, "scale", 2), Operation(4.2, "scale", 1)
    requests = (Request(9.0, 0, (1, 2), 5, 0),)
    run = Run(Scenario(0, 1, 1, expert, requests, (), operations, rooms=(0, 2, 0), slow_load_s=1.0))
    plane, stop, write = run.plane, SimEngine.stop, CheckpointStore.write
    send = CoordinatorHandle.save_manager_state
    lost, late = list[SimManager](), list[SimEngine]()

    async def write_or_terminate(store: CheckpointStore, checkpoint: ClusterCheckpoint) -> None:
        if not lost and len(plane.engines) == 2 and checkpoint.desired.target == 1:
            lost.append(plane.manager)
            await asyncio.sleep(0.1)
            plane.operator._on_answered()  # the request is not repeated
            plane.manager.process.kill()
        await write(store, checkpoint)

    async def stop_late(engine: SimEngine, by: ManagerId) -> None:
        if not late:
            late.append(engine)
            await asyncio.sleep(_LATE_S)
        await stop(engine, by)

    def send_unless_lost(coordinator: CoordinatorHandle, state: ManagerState) -> None:
        if len(plane.engines) < 2 or (lost and plane.manager is not lost[0]):
            send(coordinator, state)

    monkeypatch.setattr(CheckpointStore, "write", write_or_terminate)
    monkeypatch.setattr(CoordinatorHandle, "save_manager_state", send_unless_lost)
    monkeypatch.setattr(SimEngine, "stop", stop_late)
    assert run.judge().broken == []
    assert lost and len(late) == 1
    assert late[0].server is not None and late[0].stopped_at is None
