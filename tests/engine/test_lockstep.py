"""Engines that share experts, over real channels. Each answers as if it ran by itself while engines
join and leave, and all run the same number of steps."""

from __future__ import annotations

import time

import pytest

from swell.coordinator.manager_state import NO_MANAGER
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.engine.executor.fake_worker import expected
from tests.engine.lockstep_cluster import Cluster

pytestmark = pytest.mark.slow


def request(name: str, prompt: list[int], max_tokens: int = 20) -> EngineCoreRequest:
    seed = sum(name.encode())
    return EngineCoreRequest(name, prompt, SamplerParams(seed=seed), max_tokens=max_tokens)


class RequestTracker:
    """Submits requests and checks their outputs against the expected ones."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.requests: dict[str, EngineCoreRequest] = {}

    def submit(self, rank: int, max_tokens: int = 20) -> EngineCoreRequest:
        name = f"r{len(self.requests)}"
        self.requests[name] = request(name, [len(name), rank, len(self.requests) % 7], max_tokens)
        self.cluster.send(rank, self.requests[name])
        return self.requests[name]

    def check(self) -> None:
        self.cluster.finish()
        for name, tracker in self.requests.items():
            assert self.cluster.tokens[name] == expected(tracker), name


@pytest.fixture(params=[1, 2, 3])
def cluster(request):
    with Cluster(scheduler={"steps_in_flight": request.param}) as cluster:
        yield cluster


def steps(cluster: Cluster) -> set[int]:
    return {engine.executor.steps for engine in cluster.engines.values()}


def test_idle_engines_step_with_those_that_work_and_all_stop(cluster) -> None:
    cluster.join(0, 1, 2)
    tracker = RequestTracker(cluster)
    for rank in (1, 0, 2, 1):
        tracker.submit(rank)
        tracker.check()
        cluster.settle()
        assert len(steps(cluster)) == 1, "engines differ in the number of collectives"
    before = steps(cluster)
    time.sleep(0.1)
    assert steps(cluster) == before, "idle engines step"
    dummies = sum(engine.server.core.num_dummy_steps for engine in cluster.engines.values())
    assert dummies, "no engine stepped without rows"


def test_few_empty_steps_follow_the_last_token(cluster) -> None:
    """`steps_in_flight - 1` empty steps follow the last token where the finish is known in advance,
    as with `max_tokens`."""
    cluster.join(0)
    core = cluster.engines[0].server.core
    tracker = RequestTracker(cluster)
    spent = []
    for _ in range(3):
        before = core.num_dummy_steps
        tracker.submit(0)
        tracker.check()
        cluster.settle()
        spent.append(core.num_dummy_steps - before)
    assert spent[1:] == [cluster.config.scheduler.steps_in_flight - 1] * 2


def test_many_waves_begin_and_end_with_requests_everywhere(cluster) -> None:
    cluster.join(0, 1)
    tracker = RequestTracker(cluster)
    for index in range(60):
        tracker.submit(index % 2, max_tokens=1 + index % 5)
        if index % 3 == 0:
            cluster.receive()
        if index % 10 == 0:
            tracker.check()
    tracker.check()
    cluster.settle()
    assert len(steps(cluster)) == 1


def test_engines_join_and_leave_while_answers_stream(cluster) -> None:
    cluster.join(0)
    tracker = RequestTracker(cluster)
    tracker.submit(0, 200)
    cluster.join(1, 2)
    tracker.submit(1, 200)
    tracker.submit(2, 30)
    cluster.receive()
    cluster.join(3)
    tracker.submit(3, 100)
    tracker.check()
    roster = cluster.service.detach([1, 3], 10, NO_MANAGER)
    assert roster.ranks == [0, 2]
    cluster.stop(1)
    cluster.stop(3)
    tracker.submit(0)
    tracker.submit(2)
    tracker.check()
    cluster.settle()
    assert len(steps(cluster)) == 1


def test_a_dead_engine_does_not_stop_the_others(cluster) -> None:
    cluster.join(0, 1, 2)
    tracker = RequestTracker(cluster)
    for rank in (0, 0, 2):
        tracker.submit(rank, 300)
    cluster.until(lambda: cluster.tokens["r0"])
    cluster.stop(1)
    cluster.service.remove_failed([1])
    tracker.check()
    assert cluster.service.view().roster.ranks == [0, 2]


def test_a_worker_is_replaced_while_the_others_continue(cluster) -> None:
    cluster.join(0, 1)
    tracker = RequestTracker(cluster)
    tracker.submit(0, 300)
    tracker.submit(1, 300)
    cluster.engines[1].executor.step_s = 0.02
    cluster.until(lambda: cluster.tokens["r1"])
    with cluster.shared.changed:
        cluster.engines[1].executor.lost = "worker 0 died"
        cluster.shared.changed.notify_all()
    cluster.engines[1].executor.step_s = 0.0005
    tracker.check()
    assert cluster.engines[1].server.repairs == 1
    cluster.until(lambda: cluster.service.view().reports.state == "serving")
    states = [str(member.state) for member in cluster.service.view().roster.members]
    assert states == ["active", "active"]


def test_a_newcomer_that_dies_while_the_group_forms_leaves_the_others_serving(cluster) -> None:
    cluster.join(0, 1)
    tracker = RequestTracker(cluster)
    tracker.submit(0, 300)
    cluster.start(2)
    newcomer = cluster.engines[2]
    newcomer.executor.hold_forming.clear()
    member = newcomer.server.member
    assert "did not join" in cluster.service.join([member], 0.5).refused[2]
    tracker.submit(1, 30)
    tracker.check()
    newcomer.executor.hold_forming.set()
    cluster.stop(2)
    cluster.join(2)
    tracker.submit(2)
    tracker.check()


def test_a_pause_stops_all_engines_and_loses_no_request(cluster) -> None:
    cluster.join(0, 1)
    tracker = RequestTracker(cluster)
    tracker.submit(0, 300)
    cluster.until(lambda: cluster.tokens["r0"])
    cluster.service.pause(NO_MANAGER)
    cluster.until(lambda: cluster.service.view().reports.state == "paused")
    cluster.receive()
    tracker.submit(1)
    before = steps(cluster)
    assert len(before) == 1
    time.sleep(0.1)
    cluster.receive()
    assert steps(cluster) == before and not cluster.tokens["r1"]
    cluster.join(2)
    assert all(e.server.core.wave_member.phase is Phase.PAUSED for e in cluster.engines.values())
    tracker.submit(2)
    cluster.service.resume(NO_MANAGER)
    tracker.check()


def test_a_restarted_coordinator_is_rebuilt_from_its_engines(cluster) -> None:
    cluster.join(0, 1)
    tracker = RequestTracker(cluster)
    tracker.submit(0, 300)
    cluster.until(lambda: cluster.tokens["r0"])
    cluster.restart_coordinator()
    tracker.submit(1, 100)
    tracker.check()
    cluster.settle()
    assert cluster.service.view().roster.ranks == [0, 1]
    tracker.submit(1)  # a wave that the new coordinator only learns of from the other engine
    tracker.check()
    cluster.join(2)
    tracker.submit(2)
    tracker.check()


def test_engines_of_a_broken_group_serve_standalone_until_a_coordinator_exists() -> None:
    with Cluster(cluster={"stall_timeout_s": 2.0}) as cluster:
        cluster.join(0, 1)
        tracker = RequestTracker(cluster)
        for rank in (0, 1):
            tracker.submit(rank, 400)
        cluster.until(lambda: all(cluster.tokens.values()))
        cluster.engines[1].executor.step_s = 6.0  # the engine seems to be gone
        cluster.service.stop()
        members = [engine.server.core.wave_member for engine in cluster.engines.values()]
        cluster.until(lambda: members[0].phase is Phase.STANDALONE)
        cluster.engines[1].executor.step_s = 0.0005
        tracker.check()
        cluster.until(lambda: members[1].phase is Phase.STANDALONE)
        for rank in (0, 1):
            tracker.submit(rank)
        tracker.check()
        cluster.settle()
        newest = max(member.epoch for member in members)
        cluster.start_coordinator()
        cluster.until(lambda: all(member.epoch > newest for member in members))
        tracker.submit(0, 100)
        tracker.check()
        cluster.settle()
        assert cluster.service.view().roster.ranks == [0, 1]
        assert len(steps(cluster)) == 1
