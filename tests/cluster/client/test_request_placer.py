"""Requests of an engine that is lost or leaves."""

from __future__ import annotations

import pytest

from swell.coordinator.roster import MemberState
from tests.cluster.client.scripted_cluster import ScriptedCluster, run


@pytest.mark.parametrize("state", [MemberState.ACTIVE, MemberState.LEAVING])
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_loss_counts_for_an_engine_in_any_state(state: MemberState, is_lost: bool) -> None:
    """The roster without the engine decides whether it was lost. An earlier roster that marks it as
    leaving may not have arrived."""

    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        [request] = cluster.submit([1, 2, 3], 4)
        request.started = True
        cluster.mark(0, state)
        (cluster.lose if is_lost else cluster.detach)(0)
        assert request.is_queued and request.failed_attempts == is_lost
        cluster.join(1)
        assert request.engine is not None and request.engine.rank == 1

    run(scenario)


def test_two_losses_while_engines_leave_end_a_request() -> None:
    def scenario(cluster: ScriptedCluster) -> None:
        for rank in range(3):
            cluster.join(rank)
        [request] = cluster.submit([1, 2, 3], 4)
        for _ in range(2):
            assert request.finish_reason is None and request.engine is not None
            request.started = True
            cluster.mark(request.engine.rank, MemberState.LEAVING)
            cluster.lose(request.engine.rank)
        assert request.finish_reason is not None and len(cluster.cores) == 1

    run(scenario)
