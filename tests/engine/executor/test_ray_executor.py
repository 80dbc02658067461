"""Workers that die or stop in the middle of an answer are replaced, and the answer stays the
same."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import ray
import transformers
from ray.util.placement_group import placement_group, remove_placement_group

from swell.configs.files.adapter_files import WEIGHTS_NAME, adapter_digest
from swell.configs.lora import Adapter
from swell.configs.schema import load
from swell.coordinator.transport.channel import make_keys
from swell.coordinator.wire import WorkerStatus
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, GroupBroken, WorkerLost, build_executor
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import SchedulerOutput
from tests.engine.executor.fake_worker import regroup
from tests.support.deadlines import HANG_S
from tests.support.paths import NANO
from tests.support.weights import adapters

WANTED = [
    EngineCoreRequest("a", list(range(3, 30)), SamplerParams(), 24),
    EngineCoreRequest("b", [5] * 40, SamplerParams(temperature=0.9, seed=7), 24),
]
STALL_S = 10.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core():
    """Yields a core with two workers. The driver plays the engine: it owns the actors."""
    folder = tempfile.mkdtemp(prefix="swell-test-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    bundles = placement_group([{"CPU": 0.02}], strategy="PACK")
    ray.get(bundles.ready(), timeout=HANG_S)  # until then its bundle is on no host
    config = load(
        str(NANO),
        {
            "model.device": "cpu",
            "model.cpu_threads": 1,
            "parallel.tensor": 2,
            "cache.memory_bytes": 4_000_000,
            "cluster.stall_timeout_s": STALL_S,
            "cluster.start_timeout_s": HANG_S,
            "lora.enabled": True,
        },
    )
    executor = build_executor(config, placement_group=bundles, keys=make_keys(), host="127.0.0.1")
    core = EngineCore(config, executor, executor.start())
    yield core
    core.shutdown()
    remove_placement_group(bundles)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(core) -> dict[str, list[int]]:
    """Returns the answers of an undisturbed run."""
    submit(core)
    return answers(core)


def submit(core: EngineCore) -> None:
    for request in WANTED:
        assert core.add_request(request, b"test") is None


def answers(core: EngineCore, steps: int = 10_000, tokens: dict[str, list[int]] | None = None):
    """Runs up to this many steps and adds their tokens to `tokens` by request, which it returns."""
    tokens = {} if tokens is None else tokens
    while core.has_work and steps:
        steps -= 1
        for output in core.step().get(b"test", []):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def pids(core: EngineCore) -> list[int]:
    return [worker.pid for worker in core.executor.workers()]


def recover(core: EngineCore, failure: ExecutorError | None) -> None:
    """Recovers from a failure as `EngineServer` does."""
    while failure is not None:
        try:
            if isinstance(failure, WorkerLost):
                core.executor.repair()
                core.on_repaired()
            regroup(core)
            failure = None
        except (GroupBroken, WorkerLost) as error:
            failure = error


@pytest.fixture(scope="module")
def adapter_shapes() -> dict[str, tuple[int, int]]:
    return adapters.module_shapes(transformers.AutoModelForCausalLM.from_pretrained(NANO))


@pytest.fixture(autouse=True)
def many_repairs(monkeypatch):
    monkeypatch.setattr("swell.engine.executor.ray.MAX_REPAIRS", 99)
    monkeypatch.setattr("swell.engine.executor.ray._RELOAD_TIMEOUT_S", 15.0)
    monkeypatch.setattr("swell.engine.executor.ray._FAILURE_GRACE_S", 30.0)


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)],
    ids=["killed, and it hosts the store", "stopped"],
)
def test_a_lost_worker_is_replaced_and_the_answer_continues(core, whole, number, rank):
    before = pids(core)
    submit(core)
    tokens = answers(core, 8)
    os.kill(before[rank], number)
    with pytest.raises(WorkerLost, match=rf"worker {rank} \(pid {before[rank]}\)") as lost:
        answers(core, tokens=tokens)
    progress_counter = core.executor.progress_counter
    statuses = [worker.status for worker in core.executor.workers()]
    assert [status is WorkerStatus.LOST for status in statuses] == [rank == 0, rank == 1]
    recover(core, lost.value)
    assert {worker.status for worker in core.executor.workers()} == {WorkerStatus.READY}
    assert core.executor.workers()[rank].replaced == 1
    after = pids(core)
    assert after[rank] != before[rank] and not Path(f"/proc/{before[rank]}").exists()
    assert after[1 - rank] == before[1 - rank], "the other worker is kept"
    report = core.executor.hang_report
    if number is signal.SIGKILL:
        assert report == "", "it did not hang"
    else:
        assert_explains(Path(report.partition(":")[2]).read_text(), before)
    assert answers(core, tokens=tokens) == whole
    core.check_idle()
    while core.executor.progress_counter <= progress_counter:  # the next heartbeat reports it
        check_for(core, 0.1)


def assert_explains(report: str, pids: list[int]) -> None:
    """Checks a report on worker 1, which is suspended, while worker 0 waits for it."""
    stopped, progress, *_ = report.splitlines()
    assert stopped.startswith("worker 1 sent no heartbeat for ")
    assert re.fullmatch(r"layers or operations since .*: worker 0 \d+, worker 1 \d+", progress)
    engine, running, suspended = re.split(r"^== ", report, flags=re.MULTILINE)[1:]
    assert engine.startswith(f"engine (pid {os.getpid()}), runs")
    assert running.startswith(f"worker 0 (pid {pids[0]}), runs")
    assert suspended.startswith(f"worker 1 (pid {pids[1]}), hangs")
    stack = running.partition("Thread MainThread (most recent call first):\n")[2]
    assert re.match(r"(  File .*\n)*  File .*worker/loop.py.*WorkerLoop._handle\n", stack)
    assert "state T" in suspended and "the process did not write them" in suspended
    plans = [
        re.findall(r"^[\d:.]+ (?:plan|step) (\d+): (\d+ rows)", part, re.MULTILINE)
        for part in (engine, running)
    ]
    assert plans[1][-1] in plans[0][-2:], "the worker computes a plan that the engine has sent"
    counts = [
        re.findall(r"^tensor.*: (\d+) started, (\d+) finished", part, re.MULTILINE)
        for part in (running, suspended)
    ]
    assert all(counts), "each rank says how far its group has come"


def test_adapters_of_a_lost_worker_are_reloaded_and_a_missing_one_fails_only_its_requests(
    core, adapter_shapes, tmp_path
):
    """Adapters of a lost worker are loaded again, and only the request of a deleted one fails. The
    folder of the third adapter hangs, and the wait for it is bounded. The worker that is killed
    does not host the store."""
    requests = [WANTED[0]]
    for seed, name in enumerate(("stays", "gone", "hangs"), 1):
        folder = str(adapters.make_adapter(tmp_path / name, adapter_shapes, seed=seed))
        adapter = Adapter(name, folder, adapter_digest(name, folder))
        changes = {"request_id": name, "cache_salt": adapter.digest, "adapter": adapter}
        requests.append(msgspec.structs.replace(WANTED[0], **changes))

    def submit_all() -> None:
        for request in requests:
            assert core.add_request(request, b"test") is None

    submit_all()
    whole = answers(core)
    assert len({tuple(tokens) for tokens in whole.values()}) == 4
    submit_all()
    tokens = answers(core, 8)
    shutil.rmtree(tmp_path / "gone")
    weights = tmp_path / "hangs" / WEIGHTS_NAME
    with adapters.leased(weights):
        os.kill(pids(core)[1], signal.SIGKILL)
        with pytest.raises(WorkerLost) as lost:
            answers(core, tokens=tokens)
        recover(core, lost.value)
    failed = {o.request_id: o for outputs in core.take_failed() for o in outputs.get(b"test", [])}
    assert sorted(failed) == ["gone", "hangs"]
    assert "its folder/adapter_config.json cannot be read" in failed["gone"].stop_reason
    assert "may hang" in failed["hangs"].stop_reason
    answers(core, tokens=tokens)
    for name in ("a", "stays"):
        assert tokens[name] == whole[name]
    core.check_idle()


def test_groups_that_are_aborted_in_a_step_are_formed_again(core, whole):
    submit(core)
    tokens = answers(core, 8)
    core.executor.abort()
    with pytest.raises(GroupBroken) as broken:
        answers(core, tokens=tokens)
    recover(core, broken.value)
    assert answers(core, tokens=tokens) == whole


def test_a_failing_worker_is_replaced_a_limited_number_of_times(core, whole, monkeypatch):
    submit(core)
    tokens = answers(core, 8)
    core.executor.execute(
        SchedulerOutput(10**6, slots=[10**6], starts=[0], num_tokens=[1], samples=[1])
    )
    with pytest.raises(WorkerLost, match=r"worker \d .* failed: IndexError") as lost:
        answers(core, tokens=tokens)
    with monkeypatch.context() as patch:
        patch.setattr("swell.engine.executor.ray.MAX_REPAIRS", 0)
        with pytest.raises(ExecutorError, match="more than 0 times"):
            core.executor.repair()
    recover(core, lost.value)
    assert answers(core, tokens=tokens) == whole


def test_workers_that_die_in_an_idle_engine_are_detected(core):
    """Workers that die in an idle engine are detected. This is the last test of the file: the
    workers are not replaced."""
    core.executor.check()
    for pid in pids(core):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        check_for(core, 60.0)
    with pytest.raises(WorkerLost):
        wait_for_adapters(core)


def wait_for_adapters(core: EngineCore) -> None:
    """Waits for adapters only; earlier messages of the workers are read first."""
    for _ in range(100):
        core.executor.loaded_adapters(0.05)


def check_for(core: EngineCore, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        core.executor.check()
        time.sleep(0.05)
