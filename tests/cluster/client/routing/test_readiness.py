"""`/ready` reports the true state, and so do the counts from which an ingress learns what was
lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swell.cluster.api.admin import manager_calls
from swell.cluster.api.admin.protocol import ChangeResult
from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.routing.readiness import ReadinessTracker
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from tests.cluster.fake_cluster import FakeCluster, until
from tests.cluster.text import tokenizers_for_tests

NOWHERE = ChannelAddress("", "", "")
LIMIT_S = 10.0


def member(rank: int, state: MemberState = MemberState.ACTIVE, incarnation: int = 1) -> Member:
    return Member(rank, NOWHERE, state, incarnation=incarnation)


def view(*members: Member, busy: dict[int, int] | None = None, state: str = "serving") -> Any:
    """Returns a view. `busy` maps the rank of each engine with work to its number of steps."""
    reports = [EngineReport(rank, running=1, steps=steps) for rank, steps in (busy or {}).items()]
    return ClusterView(Roster(1, members), ClusterReports(engines=reports, state=state))


def test_a_stalled_engine_is_reported() -> None:
    readiness = ReadinessTracker(LIMIT_S)
    for now in range(12):
        readiness.on_view(view(member(0), member(1), busy={0: 7, 1: now}), float(now))
    state = readiness.check(11.0)
    assert state.ranks == [1]
    assert "engine 0" in state.reason and "11.0 s" in state.reason
    readiness.on_view(view(member(0), member(1), busy={0: 8}), 12.0)
    assert readiness.check(12.0).ranks == [0, 1]


@pytest.mark.parametrize("shares_experts", [True, False])
def test_an_engine_that_steps_with_others_is_busy_without_requests(shares_experts: bool) -> None:
    """Engines that share experts step together. If a step does not finish, none of them serves,
    also those without requests."""
    readiness = ReadinessTracker(LIMIT_S, shares_experts=shares_experts)
    reports = [EngineReport(rank, steps=7, wave_phase=Phase.RUNNING) for rank in (0, 1)]
    stuck = ClusterView(Roster(1, (member(0), member(1))), ClusterReports(engines=reports))
    for now in range(12):
        readiness.on_view(stuck, float(now))
    assert readiness.check(11.0).ranks == ([] if shares_experts else [0, 1])


def test_a_resumed_ingress_blames_no_engine() -> None:
    """A suspended ingress resumes with a queue of views. The first of them shows no progress
    yet."""
    readiness = ReadinessTracker(LIMIT_S)
    readiness.on_view(view(member(0), busy={0: 7}), 0.0)
    readiness.on_view(view(member(0), busy={0: 7}), 60.0)
    assert readiness.check(60.0).ranks == [0]
    readiness.on_view(view(member(0), busy={0: 8}), 60.0)
    assert readiness.check(60.0).ranks == [0]


def test_a_successor_is_not_blamed() -> None:
    readiness = ReadinessTracker(LIMIT_S)
    readiness.on_view(view(member(0), busy={0: 7}), 0.0)
    readiness.on_view(view(member(0, incarnation=2), busy={0: 7}), 20.0)
    assert readiness.check(20.0).ranks == [0]


@pytest.mark.parametrize("state", ["pausing", "paused", "forming"])
def test_stillness_is_excused_while_engines_must_not_step(state: str) -> None:
    readiness = ReadinessTracker(LIMIT_S)
    for now in (0.0, 20.0):
        readiness.on_view(view(member(0), busy={0: 7}, state=state), now)
    told = readiness.check(20.0)
    assert told.ranks == ([] if state == "paused" else [0])
    assert told.reason == ("paused by an operator" if state == "paused" else "")
    readiness.on_view(view(member(0), busy={0: 7}), 21.0)
    assert readiness.check(21.0).ranks == [0]


@pytest.mark.parametrize(
    ("state", "reason"), [("forming", "forming a group for"), ("pausing", "pausing for")]
)
def test_engines_whose_group_changes_for_too_long_are_not_ready(state: str, reason: str) -> None:
    """No engine runs a step while the group pauses or forms, although all are active."""
    readiness = ReadinessTracker(LIMIT_S)
    for second in range(int(LIMIT_S) + 3):
        readiness.on_view(view(member(0), member(1), state=state), float(second))
        told = readiness.check(float(second))
        assert told.ranks == ([0, 1] if second <= LIMIT_S else [])
    assert reason in told.reason
    assert readiness.check(3 * LIMIT_S).ranks == [0, 1], "an old view says nothing"
    readiness.on_view(view(member(0), member(1)), LIMIT_S + 4.0)
    assert readiness.check(LIMIT_S + 4.0).ranks == [0, 1]


def test_a_silent_coordinator_does_not_make_engines_unready() -> None:
    readiness = ReadinessTracker(LIMIT_S)
    readiness.on_view(view(member(0), busy={0: 7}), 0.0)
    assert not readiness.check(9.0).coordinator_silent
    state = readiness.check(100.0)
    assert state.coordinator_silent and state.ranks == [0]


def test_a_repairing_or_leaving_engine_is_not_ready() -> None:
    readiness = ReadinessTracker(LIMIT_S)
    members = (member(0, MemberState.REPAIRING), member(1, MemberState.LEAVING))
    readiness.on_view(view(*members), 0.0)
    assert readiness.check(0.0).ranks == []
    assert readiness.check(0.0).reason == "engine 0 replaces a worker, or wakes up"


def test_an_engine_that_this_ingress_does_not_reach_is_not_ready() -> None:
    readiness = ReadinessTracker(LIMIT_S)
    readiness.on_view(view(member(0), member(1)), 0.0)
    readiness.set_unreachable({EngineId.of(member(1)): "is not reached by this ingress"})
    state = readiness.check(0.0)
    assert state.ranks == [0] and state.reason == "engine 1 is not reached by this ingress"
    readiness.set_unreachable({})
    assert readiness.check(0.0).ranks == [0, 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_the_probe_over_http(folder: Path) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            probe = cluster.client.get

            async def reason() -> str:
                answer = await probe("/ready")
                assert answer.status_code == 503
                return answer.json()["error"]["message"]

            assert await reason() == "engine 0: reads weights"
            await cluster.join(0)
            assert (await probe("/ready")).json()["engines"] == [0]
            cluster.coordinator.publish(state="paused")
            await until(lambda: cluster.ingress.llm.view.reports.state == "paused")
            assert await reason() == "paused by an operator"
            cluster.coordinator.publish(state="serving")
            await until(lambda: cluster.ingress.llm.view.reports.state == "serving")
            cluster.ingress.llm._readiness._limit_s = 0.1
            await until(lambda: cluster.ingress.llm.check_ready().coordinator_silent)
            answer = await probe("/ready")
            assert (answer.status_code, answer.json()["coordinator"]) == (200, "silent")

    asyncio.run(run())


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_an_unresponsive_manager_is_a_503(
    folder: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(manager_calls, "_MANAGER_TIMEOUT_S", 0.05)

    async def no_answer(*_: object) -> None:
        if silent:
            await asyncio.sleep(600)
        raise ConnectionError("the replica has died")

    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            for name in ("describe", "scale", "pause"):
                vars(cluster.manager)[name] = SimpleNamespace(remote=no_answer)
            client = cluster.client
            for answer in (
                await client.get("/admin/cluster"),
                await client.post("/admin/scale", json={"engines": 2}),
                await client.post("/admin/pause", json={}),
            ):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "no_manager"

    asyncio.run(run())


def test_a_probe_names_the_unresponsive_manager(folder: Path) -> None:
    async def no_answer() -> None:
        raise ConnectionError("the replica has died")

    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            vars(cluster.manager)["not_ready_reason"] = SimpleNamespace(remote=no_answer)
            answer = await cluster.client.get("/ready")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["message"]) == (
                503,
                "starting",
                "no engine is ready; the manager does not answer: "
                "ConnectionError('the replica has died')",
            )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "arguments"),
    [
        ("scale", '{"engines": 3}', (3, None)),
        ("scale", '{"drain_timeout_s": 1.5, "engines": 3}', (3, 1.5)),
        ("drain", '{"rank": 1}', (1,)),
        ("upgrade", '{"config": {"model": {"path": "m"}}}', ({"model": {"path": "m"}},)),
        ("upgrade", '{"config": 3}', None),
        ("upgrade", "{}", None),
        ("pause", "{}", ()),
        ("pause", " ", ()),
        ("resume", "", ()),
        ("pause", '{"engines": 3}', None),
        ("pause", "[]", None),
        ("scale", "", None),
        ("drain", " ", None),
    ],
)
def test_the_manager_receives_the_arguments_of_a_change(
    folder: Path, path: str, body: str, arguments: tuple[object, ...] | None
) -> None:
    asked: list[tuple[object, ...]] = []

    async def answer(*given: object) -> ChangeResult:
        asked.append(given)
        return ChangeResult(2)

    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            vars(cluster.manager)[path] = SimpleNamespace(remote=answer)
            headers = {"content-type": "application/json"}
            told = await cluster.client.post(f"/admin/{path}", content=body, headers=headers)
            assert told.status_code == (400 if arguments is None else 202)

    asyncio.run(run())
    assert asked == ([] if arguments is None else [arguments])


def test_the_answer_marks_a_change_that_is_not_stored(folder: Path) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            cluster.manager.is_stored = False
            told = await cluster.client.post("/admin/scale", json={"engines": 2})
            assert told.status_code == 202 and told.json()["stored"] is False

    asyncio.run(run())


def test_pause_and_resume_call_the_manager(folder: Path) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            for verb in ("pause", "resume"):
                cluster.manager.refusal = None
                answer = await cluster.client.post(f"/admin/{verb}", json={})
                assert (answer.status_code, answer.json()) == (
                    202,
                    {"status": "accepted", "target": 2, "stored": True},
                )
                cluster.manager.refusal = "no room for 3 engines"
                answer = await cluster.client.post(f"/admin/{verb}", json={})
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == "no room for 3 engines"
            assert cluster.manager.calls == ["pause", "pause", "resume", "resume"]

    asyncio.run(run())
