"""Groups of workers in one process, aborted in the middle of an answer and formed again."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

import swell.worker.worker
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, GroupBroken, build_executor
from swell.engine.executor.inproc import InprocOutput
from swell.engine.wire import EngineCoreRequest
from swell.worker.comm.groups import GroupError
from swell.worker.sampler_wire import SamplerParams
from tests.engine.executor.fake_worker import regroup
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

WANTED = [
    EngineCoreRequest("a", list(range(3, 30)), SamplerParams(), 12),
    EngineCoreRequest("b", [5] * 40, SamplerParams(temperature=0.9, seed=7), 12),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_models.make(path, "llama-llama3")
    return path


@pytest.fixture(params=["one worker", "tensor 2", "pipeline 2"])
def core(request, folder):
    kind, _, size = request.param.rpartition(" ")
    split = {} if kind == "one" else {f"parallel.{kind}": int(size)}
    config = load(
        str(folder),
        {
            "model.dtype": "float32",
            "model.device": "cpu",
            "model.cpu_threads": 1,
            "parallel.executor": "inproc",
            "cache.memory_bytes": 4_000_000,
            "scheduler.max_rows": 4,
            "cluster.start_timeout_s": 30,
            **split,
        },
    )
    executor = build_executor(config)
    core = EngineCore(config, executor, executor.start())
    yield core
    core.shutdown()


Answers = dict[str, list[int]]
"""The tokens of each request."""


def answers(core: EngineCore, steps: int = 10_000, tokens: Answers | None = None) -> Answers:
    """Runs up to this many steps and adds their tokens to `tokens`, which it returns."""
    tokens = {} if tokens is None else tokens
    while core.has_work and steps:
        steps -= 1
        for output in core.step().get(b"test", []):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def submit(core: EngineCore) -> None:
    for request in WANTED:
        assert core.add_request(request, b"test") is None


def test_an_answer_continues_over_new_groups(core):
    submit(core)
    whole = answers(core)
    submit(core)
    tokens = answers(core, 5)
    regroup(core)
    answers(core, 4, tokens)
    regroup(core)
    assert answers(core, tokens=tokens) == whole
    core.check_idle()


def test_a_step_whose_groups_were_aborted_is_reported_as_broken(core, monkeypatch):
    """A step whose groups were aborted raises GroupBroken: one worker waits in the step, and the
    others wait for it in a collective."""
    if core.config.parallel.world == 1:
        pytest.skip("one worker has no groups")
    submit(core)
    whole = answers(core)
    submit(core)
    tokens = answers(core, 5)
    held, real = threading.Event(), swell.worker.worker.Worker.execute_model

    def execute_model(worker, plan):
        if worker.rank == 0:
            held.wait()
        return real(worker, plan)

    monkeypatch.setattr(swell.worker.worker.Worker, "execute_model", execute_model)

    def abort() -> None:
        core.executor.abort()
        threading.Timer(0.2, held.set).start()

    threading.Timer(0.2, abort).start()
    with pytest.raises(GroupBroken):
        answers(core, tokens=tokens)
    monkeypatch.undo()
    before = core.executor.progress_counter
    regroup(core)
    assert answers(core, tokens=tokens) == whole
    assert core.executor.progress_counter > before > 0
    core.check_idle()


def test_a_step_is_broken_if_a_peer_is_lost_in_its_replay(core, monkeypatch):
    """Only the sums of the replay notice that the other worker is gone."""
    if core.config.parallel.tensor == 1:
        pytest.skip("one worker has no sums")
    submit(core)
    whole = answers(core)
    submit(core)
    tokens = answers(core, 5)
    real = swell.worker.worker.Worker.execute_model

    def execute_model(worker, plan):
        if worker.rank == 0:
            return real(worker, plan)
        worker.mesh.tensor.abort()
        return None

    monkeypatch.setattr(swell.worker.worker.Worker, "execute_model", execute_model)
    with pytest.raises(GroupBroken):
        answers(core, tokens=tokens)
    monkeypatch.undo()
    regroup(core)
    assert answers(core, tokens=tokens) == whole
    core.check_idle()


def test_forming_groups_can_be_aborted(core, monkeypatch):
    """Groups can be aborted while they form, also before they exist."""
    if core.config.parallel.world == 1:
        pytest.skip("one worker has no groups")
    executor, real = core.executor, swell.worker.worker.Worker.regroup
    entered = threading.Event()

    def fail_or_abort(worker, plan, store):
        if worker.rank == 0:  # this worker never joins
            entered.set()
            raise GroupError("this one does not come")
        entered.wait()
        executor.abort()
        return real(worker, plan, store)

    monkeypatch.setattr(swell.worker.worker.Worker, "regroup", fail_or_abort)
    with pytest.raises(GroupBroken):
        regroup(core)
    monkeypatch.undo()
    regroup(core)
    submit(core)
    assert set(answers(core)) == {"a", "b"}


def test_a_failure_outside_collectives_stops_the_engine(core, monkeypatch):
    submit(core)

    def fail(worker, plan):
        raise OSError("out of luck")

    monkeypatch.setattr(swell.worker.worker.Worker, "execute_model", fail)
    with pytest.raises(OSError, match="out of luck"):
        answers(core)
    with pytest.raises(ExecutorError, match="has already failed") as raised:
        regroup(core)
    assert not isinstance(raised.value, GroupBroken)


def test_the_error_names_the_rank_that_failed_and_not_its_peers():
    """The peer of the rank that failed waits in an operation until its groups are aborted."""
    waiting, fault = Future(), Future()
    fault.set_exception(OSError("out of luck"))

    def abort():
        waiting.set_exception(GroupBroken("a peer has gone"))

    with pytest.raises(OSError):
        InprocOutput([waiting, fault], output_rank=0, abort=abort).get_output()
    assert waiting.done()
