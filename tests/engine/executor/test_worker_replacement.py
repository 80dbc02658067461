"""The placement of a replacement worker, and the termination of its predecessor. Ray is stubbed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from swell.configs.lora import Adapter
from swell.configs.schema import ConfigError, load
from swell.coordinator.transport.channel import Outlet, make_keys
from swell.engine.executor import ExecutorError, ExecutorLimits, WorkerLost, hang_report
from swell.engine.executor import ray as executor_module
from swell.engine.executor.adapter_loads import AdapterLoads
from swell.engine.executor.ray import RayExecutor, RayWorker
from swell.worker.wire import (
    AdapterLoaded,
    LoadAdapter,
    MemoryMeasured,
    WorkerCommand,
    WorkerFailure,
    WorkerHello,
)
from tests.support.deadlines import HANG_S


class Stopped(Exception):
    """Raised when the workers are created, where the test stops."""


class RecordingExecutor(RayExecutor):
    def __init__(self) -> None:
        config = load({"model": {"path": "m"}, "parallel": {"pipeline": 3}})
        super().__init__(config, placement_group=None, keys=make_keys(), host="127.0.0.1")
        self.created: dict[int, int] = {}

    def _create(self, rank: int, bundle: int, node: str) -> Any:
        self.created[rank] = bundle
        return f"actor {rank}"

    def _load(self, *_args: Any) -> Any:
        raise Stopped

    def start_workers(self, *ranks: int) -> None:
        with pytest.raises(Stopped):
            self._start_workers(ranks, lambda text: None)


@pytest.fixture
def executor():
    executor = RecordingExecutor()
    yield executor
    executor._heartbeats.close()
    executor._inbox.close()


def test_a_replacement_has_the_bundle_of_its_predecessor(executor, monkeypatch) -> None:
    """A replacement gets the bundle of its predecessor, also if Ray has moved a bundle to another
    node since the start, so that the order of nodes has changed."""
    table: dict[str, Any] = {"bundles_to_node_id": {0: "a", 1: "b", 2: "a"}}
    monkeypatch.setattr(executor_module, "placement_group_table", lambda group: table)
    executor.start_workers(0, 1, 2)
    assert executor.created == {0: 0, 1: 2, 2: 1}, "node by node"
    table["bundles_to_node_id"] = {0: "b", 1: "b", 2: "a"}
    executor.created.clear()
    executor.start_workers(1)
    assert executor.created == {1: 2} and executor._workers[1].node == "a"


class FrozenWorker:
    """A worker whose process loads, and stops before it connects."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_arguments: name)


class FrozenExecutor(RayExecutor):
    def __init__(self, **cluster: float) -> None:
        config = load({"model": {"path": "m"}, "parallel": {"tensor": 2}, "cluster": cluster})
        super().__init__(config, placement_group=None, keys=make_keys(), host="127.0.0.1")

    def _create(self, *_arguments: Any) -> Any:
        return FrozenWorker()

    def _load(self, workers: list[Any], _progress: Any) -> None:
        for worker in workers:
            worker.pid = 1


def test_a_replacement_that_never_connects_stops_the_engine(monkeypatch) -> None:
    """A replacement that never connects fails the engine. Nothing else shows that its process is
    frozen: Ray's task runs, and no heartbeat has arrived yet."""
    table = {"bundles_to_node_id": {0: "a"}}
    monkeypatch.setattr(executor_module, "placement_group_table", lambda group: table)
    monkeypatch.setattr(executor_module.ray, "get", lambda *_, **__: ("host", 1))
    monkeypatch.setattr(executor_module.ray, "wait", lambda refs, **_: ([], refs))
    executor = FrozenExecutor(start_timeout_s=0.5)
    try:
        with pytest.raises(ExecutorError, match="did not connect"):
            executor._start_workers([1], lambda text: None)
    finally:
        executor._heartbeats.close()
        executor._inbox.close()


def test_replies_about_adapters_are_read_without_a_wait(monkeypatch) -> None:
    """Results about adapters are read even without waiting: they may have arrived while the engine
    was idle."""
    monkeypatch.setattr(RayWorker, "exit_reason", lambda worker: "")
    executor = FrozenExecutor()
    executor._loads = AdapterLoads(1)
    outlet: Outlet[Any] = Outlet(executor._inbox.address, WorkerCommand, executor._keys)
    try:
        outlet.send(WorkerHello(0))
        executor._workers[0] = RayWorker(0, "actor", "node")
        while executor._workers[0].peer is None:
            executor._receive()
        executor.load_adapter(LoadAdapter(0, Adapter("a", "/a", "digest")))
        command = outlet.receive(HANG_S)
        outlet.send(AdapterLoaded(0, "digest", "", command.number))
        deadline = time.monotonic() + HANG_S
        while not (loaded := executor.loaded_adapters(0.0)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [one.digest for one in loaded] == ["digest"]
    finally:
        outlet.close()
        executor._heartbeats.close()
        executor._inbox.close()


@pytest.mark.parametrize("error", [None, GetTimeoutError("no helper")])
def test_a_hanging_worker_is_killed_on_its_own_node(executor, monkeypatch, error) -> None:
    killed: list[Any] = []

    def kill_process(pid: int, node: str) -> None:
        killed.append((pid, node))
        if error is not None:
            raise error

    monkeypatch.setattr(executor_module, "kill_process", kill_process)
    monkeypatch.setattr(executor_module.ray, "kill", killed.append)
    table = {"bundles_to_node_id": {0: "a", 1: "b", 2: "c"}}
    monkeypatch.setattr(executor_module, "placement_group_table", lambda group: table)
    executor.start_workers(0, 1, 2)
    executor._workers[1].pid = 77
    monkeypatch.setattr(type(executor._workers[1]), "exit_reason", lambda worker: "")
    executor._kill(executor._workers[1])
    assert killed == [(77, "b"), "actor 1"], "whether or not its node could be reached"


def test_a_terminated_worker_is_not_killed_again(executor, monkeypatch) -> None:
    """A worker that has exited is not killed again: its pid may belong to another process by
    now."""
    monkeypatch.setattr(executor_module, "kill_process", lambda *_: pytest.fail("it has ended"))
    monkeypatch.setattr(executor_module.ray, "kill", lambda actor: None)
    ended = SimpleNamespace(rank=0, pid=77, node="a", actor="actor 0", exit_reason=lambda: "died")
    executor._kill(ended)


class RepairingExecutor(RayExecutor):
    """Worker 1 is lost while worker 0 is replaced."""

    def __init__(self, fails_in: str) -> None:
        config = load({"model": {"path": "m"}, "parallel": {"tensor": 2}})
        super().__init__(config, placement_group=None, keys=make_keys(), host="127.0.0.1")
        self._limits = ExecutorLimits(8, 64, 100)
        self._fails_in = fails_in
        self.calls: list[tuple[str, list[int]]] = []
        self._workers = {rank: RayWorker(rank, "actor", "node") for rank in range(2)}
        self._lost = {0: "died"}

    def _call(self, name: str, ranks: Iterable[int]) -> None:
        self.calls.append((name, sorted(ranks)))
        if name == self._fails_in:
            self._fails_in, self._lost = "", {1: "died"}
            self.check()

    def _start_workers(self, ranks: Iterable[int], _progress: Any) -> None:
        ranks = list(ranks)
        self._workers |= {rank: RayWorker(rank, "actor", "node") for rank in ranks}
        self._call("start", ranks)

    def _init_caches(self, ranks: Sequence[int], _limits: Any, _progress: Any) -> None:
        self._call("cache", ranks)

    def _load_adapters(self, ranks: list[int]) -> None:
        self._call("adapters", ranks)


@pytest.mark.parametrize("fails_in", ["start", "cache", "adapters"])
def test_a_replacement_that_is_not_complete_is_replaced_with_the_next_one(
    monkeypatch, fails_in: str
) -> None:
    """The first replacement may lack its cache or its adapters."""
    monkeypatch.setattr(executor_module.ray, "kill", lambda _actor: None)
    executor = RepairingExecutor(fails_in)
    try:
        with pytest.raises(WorkerLost):
            executor.repair()
        assert executor.calls.pop() == (fails_in, [0])
        executor.calls.clear()
        executor.repair()
        assert executor.calls == [(name, [0, 1]) for name in ("start", "cache", "adapters")]
        executor.check()
    finally:
        executor._heartbeats.close()
        executor._inbox.close()


def test_a_refusal_is_reported_instead_of_the_failure_of_groups_that_it_causes(monkeypatch) -> None:
    """A worker that refuses leaves its groups, and the report of a peer may arrive first."""
    monkeypatch.setattr(RayWorker, "exit_reason", lambda worker: "")
    executor = FrozenExecutor()
    executor._workers = {rank: RayWorker(rank, "actor", "n", peer=b"%d" % rank) for rank in (0, 1)}
    arriving: list[Any] = [
        WorkerFailure(0, 1, "a peer has left", group=True),
        MemoryMeasured(0, None, "no KV block fits"),
    ]

    def receive(_wait_s: float) -> Any:
        messages = [arriving.pop(0)] if arriving else []
        return [(b"%d" % message.rank, message) for message in messages]

    monkeypatch.setattr(executor._inbox, "receive", receive)
    monkeypatch.setattr(executor, "_send", lambda *_message: None)
    try:
        with pytest.raises(ConfigError, match="no KV block fits"):
            executor._measure([0, 1], lambda text: None)
    finally:
        executor._heartbeats.close()
        executor._inbox.close()


@pytest.mark.parametrize("broken", ["run_on_node", "_folder"])
def test_a_description_that_fails_does_not_stop_a_replacement(monkeypatch, broken) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("/proc has another form")

    monkeypatch.setattr(hang_report, "run_on_node", lambda *_: "")
    monkeypatch.setattr(hang_report, broken, fail)
    monkeypatch.setattr(hang_report, "_write", fail)
    reports = hang_report.HangReports("group")
    reports.save("worker 0 hangs", [1], ["node"])
    assert reports.newest == ""
    assert hang_report.save_report_of_process("engine 0 hangs", 1, "node") == ""
