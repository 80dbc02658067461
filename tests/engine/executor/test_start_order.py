"""An executor starts its workers phase by phase: what a later phase measures, all workers have
allocated before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import swell.worker.worker
from swell.configs.schema import Config, ConfigError, load
from swell.coordinator.transport.channel import Outlet, make_keys
from swell.engine.executor import Executor, ExecutorLimits, GroupBroken, WorkerLost
from swell.engine.executor import ray as ray_executor
from swell.engine.executor.inline import InlineExecutor
from swell.engine.executor.inproc import InprocExecutor
from swell.engine.executor.ray import RayExecutor, RayWorker
from swell.worker.comm.groups import GroupError
from swell.worker.loop import HeartbeatThread, WorkerLoop
from swell.worker.wire import (
    CacheProgress,
    CaptureProgress,
    CompileProgress,
    GroupPlan,
    Regrouped,
    Shutdown,
    StartMessage,
    WorkerCommand,
    WorkerLimits,
    WorkerProgress,
)
from tests.support.deadlines import HANG_S

PHASES = ["load", "regroup", "measure", "init_cache"]


class Record:
    """The calls of all workers of an engine, in their order, and what they do besides."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sizes: list[tuple[int, int, tuple[int, int]]] = []
        self.during: dict[tuple[str, int], Callable[[], object]] = {}
        """(phase, rank) -> called in this phase."""
        self.reports: dict[tuple[str, int], list[StartMessage]] = {}
        """(phase, rank) -> the reports of this worker in this phase."""
        self.ended: list[int] = []
        """Ranks that have left their groups, or were killed."""

    def phases(self) -> list[str]:
        return [phase for phase, _rank in self.calls]


class RecordingWorker:
    """A worker without tensors. The one of rank 1 has room for fewer blocks."""

    record: Record
    progress_counter = 0
    device = SimpleNamespace(type="cpu")

    def __init__(
        self,
        _config: Config,
        rank: int,
        _local_workers: int,
        _gpu: int,
        progress: Callable[[StartMessage], None],
        _host: str,
    ) -> None:
        self.rank, self._progress = rank, progress

    def _call(self, phase: str) -> None:
        time.sleep(0.02 * self.rank)  # the others would overtake this one
        self.record.calls.append((phase, self.rank))
        self.record.during.get((phase, self.rank), lambda: None)()
        for message in self.record.reports.get((phase, self.rank), ()):
            self._progress(message)

    def load(self) -> int:
        self._call("load")
        return 0

    def open_store(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def regroup(self, plan: GroupPlan, _store: Any = None) -> Regrouped:
        self._call("regroup")
        return Regrouped(self.rank, plan.generation)

    def measure(self) -> WorkerLimits:
        self._call("measure")
        return WorkerLimits(10 - self.rank, 64, 99, offload_blocks=(4 + self.rank, 2))

    def init_cache(self, *sizes: Any) -> None:
        self.record.sizes.append(sizes)
        self._call("init_cache")

    def abort(self, generation: int | None = None) -> None:
        """Is never inside an operation."""

    def poll_groups(self) -> None:
        """The groups never fail."""

    def shutdown(self) -> None:
        self.record.ended.append(self.rank)


class ThreadActor:
    """A worker actor whose process is a thread, with both of its channels."""

    def __init__(self, executor: RayExecutor, rank: int) -> None:
        keys, addresses = executor._keys, (executor._inbox.address, executor._heartbeats.address)
        self._outlets: list[Outlet[WorkerCommand]] = [
            Outlet(address, WorkerCommand, keys) for address in addresses
        ]
        report = self._outlets[0].send
        self.rank = rank
        self._worker = RecordingWorker(executor._config, rank, 1, 0, report, "127.0.0.1")

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"_remote_{name}"))

    def _remote_load(self) -> int:
        self._worker.load()
        return 100 + self.rank

    def _remote_open_store(self) -> tuple[str, int]:
        return self._worker.open_store()

    def _remote_run(self, generation: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(generation,), daemon=True)
        thread.start()
        return thread

    def _run(self, generation: int) -> None:
        loop = WorkerLoop(self.rank, self._worker, self._outlets[0], generation)
        heartbeats = HeartbeatThread(loop, self._outlets[1], 0.1)
        try:
            loop.run()
        except SystemExit:
            """Plays the death of the process."""
        finally:
            heartbeats.stop()
            self._outlets[0].close()
            self._worker.shutdown()


class ThreadRayExecutor(RayExecutor):
    def _create(self, rank: int, bundle: int, node: str) -> Any:
        return ThreadActor(self, rank)

    def _kill(self, worker: RayWorker) -> None:
        assert worker.peer is not None
        self._inbox.send(worker.peer, Shutdown())
        super()._kill(worker)
        worker.run.join(HANG_S)


def wait(refs: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
    """Plays `ray.wait` for values, and for the threads of `run`."""
    for ref in refs if num_returns == len(refs) else ():
        if isinstance(ref, threading.Thread):
            ref.join(timeout)
    running = [ref for ref in refs if isinstance(ref, threading.Thread) and ref.is_alive()]
    return [ref for ref in refs if ref not in running], running


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    record = Record()
    monkeypatch.setattr(swell.worker.worker, "Worker", RecordingWorker)
    monkeypatch.setattr(RecordingWorker, "record", record, raising=False)
    table = {"bundles_to_node_id": {0: "a"}}
    monkeypatch.setattr(ray_executor, "placement_group_table", lambda group: table)
    for name, call in {"wait": wait, "get": lambda ref, **_: ref, "kill": lambda _: None}.items():
        monkeypatch.setattr(ray_executor.ray, name, call)
    monkeypatch.setattr(ray_executor, "kill_process", lambda *_: None)
    return record


@pytest.fixture(params=["inline", "inproc", "ray"])
def executor(request: pytest.FixtureRequest, record: Record) -> Iterator[Executor]:
    yield from started(request.param, {})


def started(kind: str, parallel: dict[str, object]) -> Iterator[Executor]:
    size = {} if kind == "inline" else {"tensor": 2}
    config = load(
        {
            "model": {"path": "m", "device": "cpu"},
            "parallel": {**size, **parallel},
            "cluster": {"start_timeout_s": HANG_S},
        }
    )
    made: Executor
    if kind == "ray":
        made = ThreadRayExecutor(config, placement_group=None, keys=make_keys(), host="127.0.0.1")
    else:
        made = {"inline": InlineExecutor, "inproc": InprocExecutor}[kind](config)
    yield made
    made.shutdown()


def test_a_start_shows_the_share_of_each_phase(
    executor: Executor, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 shows what it does. Workers that are threads wait for the one that compiles."""
    record.reports["load", 0] = [
        CompileProgress(0, 1, 4),
        WorkerProgress(0, 0, 0),
        WorkerProgress(0, 5 * 10**9, 10**10, 31, 290),
        WorkerProgress(0, 10**10, 10**10, 290, 290),
    ]
    record.reports["load", 1] = [WorkerProgress(1, 3, 10, 2, 3)]
    record.reports["init_cache", 0] = [
        CacheProgress(0, 0, 9),
        CacheProgress(0, 9, 9),
        CaptureProgress(0, 3, 35),
    ]
    record.reports["init_cache", 1] = [CacheProgress(1, 7, 9)]
    texts: list[str] = []
    expected = [
        "compiling kernels, 1 of 4 files",
        "loading weights",
        "loading weights, tensor 31 of 290, 50% of 10.0 GB",
        "loading weights, tensor 290 of 290, 100% of 10.0 GB",
    ]
    if isinstance(executor, RayExecutor):

        def wait_for_messages(refs: list[Any], **limits: Any) -> tuple[list[Any], list[Any]]:
            return wait(refs, **limits) if expected[-1] in texts else ([], refs)

        monkeypatch.setattr(ray_executor.ray, "wait", wait_for_messages)
    executor.start(texts.append)
    first = texts.index(expected[0])
    assert texts[first : first + 4] == expected
    assert not [text for text in texts if "30%" in text]
    assert texts[texts.index("measuring memory") :] == [
        "measuring memory",
        "allocating the KV cache",
        "allocating the KV cache, 0 of 9 blocks",
        "allocating the KV cache, 9 of 9 blocks",
        "capturing steps, 3 of 35",
    ]


def test_the_thread_that_compiles_shows_it(record: Record) -> None:
    record.reports["load", 1] = [CompileProgress(1, 3, 4)]
    texts: list[str] = []
    for executor in started("inproc", {}):
        executor.start(texts.append)
    assert "compiling kernels, 3 of 4 files" in texts


def test_every_worker_ends_a_phase_before_the_next_one_begins(
    executor: Executor, record: Record
) -> None:
    """The memory is measured when the groups of all workers have taken theirs, and the cache has
    the smallest number of blocks of all workers."""
    limits = executor.start()
    world = len({rank for _, rank in record.calls})
    assert record.phases() == [phase for phase in PHASES for _ in range(world)]
    smallest = ExecutorLimits(11 - world, 64, 99, offload_blocks=(4, 2))
    assert limits == smallest and record.sizes == [smallest.of_cache] * world


@pytest.mark.parametrize("kind", ["inline", "inproc", "ray"])
def test_engines_that_share_experts_form_their_own_groups_first(record: Record, kind: str) -> None:
    for executor in started(kind, {"expert": True}):
        executor.start()
        assert list(dict.fromkeys(record.phases())) == PHASES
        assert executor.store is not None, "groups with other engines form over it later"


def test_a_model_that_leaves_no_memory_is_an_error_of_the_configuration(
    executor: Executor, record: Record
) -> None:
    def refuse() -> None:
        raise ValueError("no KV block fits: lower it")

    record.during["measure", 0] = refuse
    with pytest.raises(ConfigError, match="no KV block fits: lower it"):
        executor.start()
    assert "init_cache" not in record.phases()


@pytest.mark.parametrize("phase", ["measure", "init_cache"])
@pytest.mark.parametrize("kind", ["inproc", "ray"])
def test_a_peer_that_is_lost_between_the_phases_ends_the_start(
    record: Record, kind: str, phase: str
) -> None:
    def leave() -> None:
        raise SystemExit

    def notice() -> None:
        raise GroupError("a peer has gone")

    record.during[phase, 1] = leave if kind == "ray" else notice
    record.during[phase, 0] = notice
    expected = WorkerLost if kind == "ray" else GroupBroken
    for executor in started(kind, {}):
        with pytest.raises(expected):
            executor.start()
        executor.shutdown()
        assert set(record.ended) == {0, 1}
    later = PHASES[PHASES.index(phase) + 1 :]
    assert not {*record.phases()} & {*later}


def test_a_failure_of_a_replacement_is_noticed(record: Record) -> None:
    """A replacement only loads and allocates. The engine notices that it cannot, before its groups
    form."""
    for executor in started("ray", {}):
        assert isinstance(executor, RayExecutor)
        executor.start()
        record.calls.clear()
        executor._lost[1] = "died"
        executor.repair()
        assert record.calls == [("load", 1), ("init_cache", 1)]

        def fail() -> None:
            raise MemoryError("no memory")

        record.during["init_cache", 1] = fail
        executor._lost[1] = "died"
        with pytest.raises(WorkerLost, match=r"worker 1 .*MemoryError: no memory"):
            executor.repair()
