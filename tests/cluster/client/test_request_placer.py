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


NUMERICS = {0: "fma", 1: "", 2: "fma", 3: "other"}
"""The numerics class of each engine; empty: unknown."""


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("begins", NUMERICS)
def test_an_answer_that_has_begun_continues_on_its_numerics_class(begins: int, tokens: int) -> None:
    """The metric counts moves to another class, which happen only if none of its engines is left.
    An answer of an engine of an unknown class may continue on any engine."""

    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(begins, numerics=NUMERICS[begins])
        requests = cluster.submit([1, 2, 3], 9, n=8)
        for _ in range(tokens):
            cluster.step(begins, 0.1)
        for rank in NUMERICS.keys() - {begins}:
            cluster.join(rank, numerics=NUMERICS[rank])
        cluster.lose(begins)
        used = {each.ranks[-1] for each in requests}
        alike = {rank for rank in NUMERICS if rank != begins and NUMERICS[rank] == NUMERICS[begins]}
        others = NUMERICS.keys() - {begins}
        assert used == alike if tokens and alike else used <= others
        assert len(used) > 1 or len(alike) == 1

    shown = run(scenario)
    is_unlike = bool(tokens) and begins == 3
    assert shown.get("numerics_changes_total", 0) == (8 if is_unlike else 0)
    assert shown["resubmitted_requests_total"] == 8
