"""`GET /admin/events` streams the state of the cluster, and observes it only while there
are readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swell.cluster.api.admin.protocol import ClusterState, CoordinatorState, RescaleState
from swell.cluster.api.live import feed as live_feed
from swell.cluster.api.live.cluster_events import Observation, coordinator_answers, happened
from swell.coordinator import roster as rosters
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import EngineReport, WorkerReport, WorkerStatus
from tests.cluster.fake_cluster import FakeCluster, body, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

Scene = Callable[[FakeCluster], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_S", 0.01)
    monkeypatch.setattr(live_feed, "LINGER_S", 0.05)


def play(folder: Path, scene: Scene, **settings: object) -> None:
    async def run() -> None:
        async with FakeCluster(folder, **settings).serving() as cluster:
            await scene(cluster)

    asyncio.run(run())


async def events(cluster: FakeCluster, seconds: int = 60) -> AsyncIterator[dict[str, Any]]:
    path = f"/admin/events?seconds={seconds}"
    async with cluster.client.stream("GET", path) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def feed_of(cluster: FakeCluster) -> live_feed.LiveFeed:
    return cluster.ingress._events._feed


def test_without_seconds_there_is_one_event(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(3)
        answer = await cluster.client.get("/admin/events")
        assert answer.headers["content-type"].startswith("text/event-stream")
        (event,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        found = json.loads(event.removeprefix("data: "))
        assert [engine["rank"] for engine in found["engines"]] == [3]
        assert found["cluster"] is None and "ChangeResult" not in str(found["manager_error"])
        await until(lambda: feed_of(cluster)._task is None)

    play(folder, scene)


def test_single_events_come_from_one_observer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has the rates and the log since the one before."""
    monkeypatch.setattr(live_feed, "LINGER_S", 1e6)

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        tasks = set()
        for _ in range(3):
            answer = await cluster.client.get("/admin/events")
            tasks.add(feed_of(cluster)._task)
        assert len(tasks) == 1 and None not in tasks
        assert json.loads(answer.text.split("data: ")[1])["rates"]
        cluster.ingress.begin_drain()
        assert feed_of(cluster)._task is None

    play(folder, scene)


def test_an_engine_that_dies_and_its_requests_are_in_the_log(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=2)
        await cluster.join(1)
        stream = events(cluster)
        await anext(stream)
        await cluster.kill(first)
        entries: list[tuple[str, str]] = []
        async for event in stream:
            entries += [(entry["kind"], entry["text"]) for entry in event["log"]]
            if entries:
                break
        assert entries[0] == ("died", "engine 0 was lost")

    play(folder, scene)


def test_the_newest_requests_and_their_rates_are_sent(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        await until(lambda: cluster.ingress.services.metrics.totals())
        stream = events(cluster)
        await anext(stream)
        answer = await cluster.client.post("/v1/completions", json=body([1, 2], 4))
        tokens = 0.0
        async for event in stream:
            tokens += sum(rate["tokens_per_s"] for rate in event["rates"])
            if tokens and not event["requests"][0]["running"]:
                break
        (request,) = event["requests"]
        assert (request["id"], request["ranks"]) == (answer.json()["id"], [0])

    play(folder, scene)


def test_the_number_of_readers_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swell.cluster.api.live.feed.MAX_READERS", 2)

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        readers = [events(cluster) for _ in range(2)]
        for reader in readers:
            await anext(reader)
        refused = await cluster.client.get("/admin/events")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_readers"
        for reader in readers:
            await reader.aclose()  # type: ignore[attr-defined]
        await until(lambda: feed_of(cluster)._task is None)
        assert (await cluster.client.get("/admin/events")).status_code == 200

    play(folder, scene)


def test_a_stream_ends_in_time_and_at_a_shutdown(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        assert [event async for event in events(cluster, 1)]
        stream = events(cluster, 3600)
        await anext(stream)
        cluster.ingress.begin_drain()
        assert len([event async for event in stream]) <= 2

    play(folder, scene)


@pytest.mark.parametrize("seconds", ["-1", "3601", "x", "1.5", ""])
def test_a_wrong_duration_is_refused(folder: Path, seconds: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        answer = await cluster.client.get(f"/admin/events?seconds={seconds}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "seconds"

    play(folder, scene)


def test_observations_use_a_bounded_share_of_a_core(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(min(seconds, 0.01))

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        monkeypatch.setattr(live_feed.asyncio, "sleep", pause)
        monkeypatch.setattr(live_feed.time, "thread_time", iter(range(1000)).__next__)
        await cluster.client.get("/admin/events")
        await until(lambda: pauses)
        assert 1 / live_feed.MAX_SHARE in pauses

    play(folder, scene)


def observed(members: Roster, **changes: Any) -> Observation:
    fields = {"reports": (), "cluster": None, "manager_answers": True, "coordinator_answers": True}
    return Observation(members, **{**fields, "moved_requests": 0, **changes})


def test_the_log_distinguishes_leaving_from_dying() -> None:
    address = ChannelAddress("host", "ipc://x", "tcp://127.0.0.1:1")
    two = rosters.of(1, [Member(0, address, incarnation=5), Member(1, address, incarnation=6)])
    one = Roster(2, two.members[1:])
    assert list(happened(observed(two), observed(one))) == [("died", "engine 0 was lost")]
    left = Roster(2, two.members[1:], left=(5,))
    assert list(happened(observed(two), observed(left))) == [("left", "engine 0 left")]
    assert [kind for kind, _ in happened(observed(one), observed(two))] == ["joined"]
    away = observed(two, coordinator_answers=False, manager_answers=False, moved_requests=3)
    assert [kind for kind, _ in happened(observed(two), away)] == ["moved", "lost", "lost"]
    assert [kind for kind, _ in happened(away, observed(two, moved_requests=3))] == [
        "found",
        "found",
    ]


def state_with(coordinator: CoordinatorState) -> ClusterState:
    idle = RescaleState(phase="idle")
    return ClusterState(
        epoch=1,
        wave=0,
        state="serving",
        target=1,
        engines=[],
        coordinator=coordinator,
        rescale=idle,
    )


def test_the_log_names_a_coordinator_that_was_replaced_unnoticed() -> None:
    first, second = (state_with(CoordinatorState(pid=pid)) for pid in (7, 8))
    before, after = observed(Roster(), cluster=first), observed(Roster(), cluster=second)
    assert [kind for kind, _ in happened(before, after)] == ["lost", "found"]
    away = observed(Roster(), cluster=first, coordinator_answers=False)
    texts = [text for _, text in happened(away, after)]
    assert texts == ["the coordinator answers again", "another coordinator runs, as process 8"]


def test_the_log_names_lost_workers_and_their_replacements() -> None:
    def kinds(*states: WorkerReport) -> list[list[str]]:
        reports = [(EngineReport(3, incarnation=5, workers=(state,)),) for state in states]
        seen = [observed(Roster(), reports=one) for one in reports]
        return [[kind for kind, _ in happened(*pair)] for pair in pairwise(seen)]

    ready, lost = WorkerReport(WorkerStatus.READY, 7), WorkerReport(WorkerStatus.LOST, 7)
    loading = WorkerReport(WorkerStatus.LOADING, 0, 1)
    replaced = WorkerReport(WorkerStatus.READY, 8, 1)
    assert kinds(ready, lost, loading, replaced, replaced) == [["died"], [], ["joined"], []]
    assert kinds(ready, replaced) == [["died", "joined"]], "between two observations"
    assert kinds(replaced, WorkerReport(WorkerStatus.READY, 9, 2)) == [["died", "joined"]]
    other = observed(Roster(), reports=(EngineReport(3, incarnation=6, workers=(ready,)),))
    first = observed(Roster(), reports=(EngineReport(3, incarnation=5, workers=(ready,)),))
    assert list(happened(first, other)) == [], "another engine has other workers"


def test_the_log_names_sleeping_engines_while_the_manager_is_away() -> None:
    def seen(*levels: int) -> Observation:
        reports = [EngineReport(rank, sleep_level=level) for rank, level in enumerate(levels)]
        return observed(Roster(), reports=tuple(reports), manager_answers=False)

    awake, asleep, nobody = seen(0, 0), seen(0, 1), seen()
    assert list(happened(awake, asleep)) == [("changed", "the engines sleep")]
    assert list(happened(asleep, awake)) == [("changed", "the engines are awake")]
    assert not [*happened(asleep, nobody), *happened(nobody, asleep)], "no engine reports"


def test_an_event_has_the_sleep_level_of_each_engine(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        await cluster.join(1)
        reports = [EngineReport(0), EngineReport(1, sleep_level=2)]
        cluster.coordinator.publish(engines=reports)
        await until(lambda: cluster.ingress.services.llm.view.reports.engines)
        answer = await cluster.client.get("/admin/events")
        event = json.loads(answer.text.split("data: ")[1])
        assert [engine["sleep_level"] for engine in event["engines"]] == [0, 2]

    play(folder, scene)


def test_the_manager_knows_first_that_the_coordinator_is_away() -> None:
    away, there = (state_with(CoordinatorState(error=error)) for error in ("no answer", None))
    assert not coordinator_answers(away, True, is_silent=False)
    assert coordinator_answers(there, False, is_silent=False)
    assert not coordinator_answers(there, True, is_silent=True)
    assert not coordinator_answers(None, False, is_silent=False), "the manager is away, too"


def test_a_manager_that_does_not_answer_delays_no_event(folder: Path) -> None:
    """The engines are shown as they are now, and the manager's state as it was."""

    async def scene(cluster: FakeCluster) -> None:
        never = asyncio.Event()

        class Silent:
            async def remote(self) -> None:
                await never.wait()

        feed_of(cluster)._manager._manager = SimpleNamespace(describe=Silent())
        await cluster.join(0)
        stream = events(cluster)
        await anext(stream)
        await cluster.join(1)
        async for event in stream:
            if len(event["engines"]) == 2:
                break
        assert event["cluster"] is None
        await stream.aclose()

    play(folder, scene)


def test_an_observation_that_fails_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        stream = events(cluster)
        await anext(stream)

        def fail(*_: object) -> None:
            raise ValueError("counts that do not fit")

        with monkeypatch.context() as patch:
            patch.setattr(live_feed, "rates_between", fail)
            await until(lambda: "left out of /admin/events" in caplog.text)
        assert (await anext(stream))["engines"]
        await stream.aclose()

    play(folder, scene)


def test_streams_without_observations_get_comments_and_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "_PATIENCE_S", 0.01)

    async def scene(cluster: FakeCluster) -> None:
        def fail() -> None:
            raise ValueError

        monkeypatch.setattr(feed_of(cluster), "_add", fail)
        answer = await cluster.client.get("/admin/events?seconds=1")
        assert answer.status_code == 200
        assert set(answer.text.split("\n\n")) == {": ping", ""}

    play(folder, scene)


def test_errors_with_text_that_is_not_unicode_are_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        async def refuse() -> None:
            raise OSError("/models/\udcff")

        monkeypatch.setattr(feed_of(cluster)._manager, "_ask", refuse)
        event = await anext(events(cluster))
        assert event["manager_error"] == "OSError: /models/\udcff"

    play(folder, scene)
