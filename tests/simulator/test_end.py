"""The end of a cluster: its engines finish their requests, and nothing of it is left."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import AtMessage, Operation, Request, Scenario


def _run(*operations: Operation) -> Run:
    requests = (Request(3.5, 0, (1, 2, 3), 24, 1),)
    return Run(Scenario(0, 2, 2, False, requests, (), operations))


async def _nothing(*_args: object, **_options: object) -> None:
    pass


def test_an_orderly_end_leaves_nothing() -> None:
    assert _run().judge_to_end().broken == []


@pytest.mark.parametrize(
    ("owner", "method", "law"),
    [
        (Fleet, "wait_idle", "ended with the cluster"),
        (Placement, "close", "the cluster leaves ['sim-engine"),
        (CoordinatorHandle, "close", "the cluster leaves ['coordinator"),
    ],
)
def test_an_end_that_omits_a_step_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, law: str
) -> None:
    monkeypatch.setattr(owner, method, _nothing)
    assert any(law in broken for broken in _run().judge_to_end().broken)


def test_an_end_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_args: object) -> None:
        await asyncio.sleep(1e6)

    monkeypatch.setattr(Placement, "close", hang)
    assert _run().judge_to_end().broken == ["the manager does not end the cluster"]


def test_a_change_during_the_end_is_refused() -> None:
    run = _run(Operation(3.0, "scale", 3, AtMessage("stop", 1)))
    answers: list[str] = []
    run.plane.on_answer.append(lambda _manager, call, error: answers.append(f"{call}: {error}"))
    assert run.judge_to_end().broken == []
    [answer] = answers
    assert answer.startswith("scale: the cluster is shutting down")


def test_a_deployment_during_the_end_starts_the_cluster_again() -> None:
    run = _run(Operation(3.0, "redeploy", 1, AtMessage("stop", 1)))
    assert run.judge_to_end().broken == []
    assert run.plane.num_redeploys == 1 and len(run.plane.engines) > 2
