"""An engine with requests that wait for adapters: all others continue, and the waiting ones can be
aborted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swell.configs.lora import Adapter
from swell.configs.schema import load
from swell.coordinator.transport.runtime import THREADS
from swell.coordinator.wire import EngineReport, Pause
from swell.engine import adapter_loader
from swell.engine.adapter_admission import LOAD_TIMEOUT_S
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorLimits, WorkerLost
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.serving.engine_report import report_of
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import AdapterLoaded, LoadAdapter
from tests.engine.executor.fake_worker import VOCAB, FakeExecutor, expected, run, token_ids


class LoadingExecutor(FakeExecutor):
    """An executor whose worker loads the adapters that the test lets it load."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.commands: list[LoadAdapter] = []
        self.answers: list[AdapterLoaded] = []
        self.waits: list[float] = []

    def load_adapter(self, command: LoadAdapter) -> None:
        self.commands.append(command)

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        self.waits.append(wait_s)
        answers, self.answers = self.answers, []
        return answers

    def finish(self, name: str, failure: str = "") -> None:
        self.answers.append(AdapterLoaded(0, f"digest of {name}", failure))


def make(
    clock: Callable[[], float] = THREADS.now, **lora: object
) -> tuple[EngineCore, LoadingExecutor]:
    config = load(
        {
            "model": {"path": "none"},
            "cache": {"block_tokens": 4},
            "lora": {"enabled": True, "max_adapters": 2, **lora},
        }
    )
    executor = LoadingExecutor()
    return EngineCore(config, executor, ExecutorLimits(64, 64, VOCAB), clock), executor


def request(id: str, name: str | None = None, **changes: object) -> EngineCoreRequest:
    plain = EngineCoreRequest(id, [3, 1, 4, 1, 5], SamplerParams(), 4)
    if name is not None:
        adapter = Adapter(name, f"/secret/{name}", f"digest of {name}")
        plain = msgspec.structs.replace(plain, adapter=adapter, cache_salt=name)
    return msgspec.structs.replace(plain, **changes)


def report(core: EngineCore) -> EngineReport:
    return report_of(
        core,
        rank=0,
        incarnation=1,
        progress_at_forming=0,
        repairs=0,
        resets=0,
        roster_epoch=0,
    )


def test_others_are_answered_while_an_adapter_is_loaded() -> None:
    core, executor = make()
    plain, held = request("plain"), request("held", "a")
    assert core.add_request(held, b"one") is None and core.add_request(plain, b"two") is None
    outputs = {}
    while not outputs.get(b"two") or outputs[b"two"][-1].finish_reason is None:
        for client, answers in core.step().items():
            outputs.setdefault(client, []).extend(answers)
    assert b"one" not in outputs and report(core).waiting == 1
    assert [command.adapter.name for command in executor.commands] == ["a"]
    before = core.progress
    assert core.has_work and core.step() == {}
    assert core.progress > before, "an engine that waits for an adapter has not stalled"
    with pytest.raises(AssertionError, match="1 requests wait for adapters"):
        core.check_idle()
    assert report(core).adapters_waited_for == 1 and report(core).adapters_loaded == 0
    executor.finish("a")
    assert token_ids(run(core)["held"]) == expected(held)
    assert (report(core).adapters_loaded, report(core).adapter_loads) == (1, 1)
    assert {row.adapter for plan in executor.plans for row in plan.new_requests} == {
        "",
        "digest of a",
    }
    core.check_idle()


def test_a_failure_ends_its_requests_and_shows_no_folder() -> None:
    core, executor = make()
    core.add_request(request("1", "a"), b"")
    core.add_request(request("2", "b"), b"")
    core.step()
    executor.finish("a", "/secret/a/adapter_model.safetensors cannot be read")
    executor.finish("b")
    outputs = run(core)
    (failed,) = outputs["1"]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.stop_reason == "its folder/adapter_model.safetensors cannot be read"
    assert token_ids(outputs["2"]) == expected(request("2", "b"))
    assert (report(core).adapter_loads, report(core).adapter_load_failures) == (1, 1)
    core.check_idle()


def test_a_paused_engine_waits_for_adapters_without_spinning() -> None:
    core, executor = make(max_adapters=1)
    core.add_request(request("1", "a"), b"")
    core.step()
    executor.finish("a")
    core.step()
    core.add_request(request("2", "b"), b"")
    core.wave_member.pause(Pause(core.wave_member.epoch, 1))
    while core._in_flight:
        core.step()
    assert core.scheduler.requests and core.has_work
    executor.waits.clear()
    assert core.step() == {} and executor.waits == [adapter_loader._ADAPTER_WAIT_S]


def test_a_load_without_waiting_requests_is_not_late() -> None:
    """A load that no request waited for is not late: its result is read when a request next asks
    for the adapter."""
    now = 0.0
    core, executor = make(lambda: now)
    core.add_request(request("1", "a"), b"")
    core.step()
    core.abort_requests(["1"])
    executor.finish("a")
    now = 2 * LOAD_TIMEOUT_S
    again = request("2", "a")
    core.add_request(again, b"")
    assert token_ids(run(core)["2"]) == expected(again)
    assert [command.adapter.name for command in executor.commands] == ["a"]


def test_waiting_requests_can_be_aborted() -> None:
    core, executor = make()
    for id, client in (("1", b"x"), ("2", b"x"), ("3", b"y")):
        core.add_request(request(id, "a"), client)
    core.step()
    core.abort_requests(["1"])
    assert [r.request_id for r in core.abort_client(b"y")] == ["3"]
    executor.finish("a")
    assert list(run(core)) == ["2"]
    core.check_idle()


def test_lost_steps_lose_no_waiting_request() -> None:
    core, executor = make()
    core.add_request(request("1", "a"), b"")
    core.add_request(request("2"), b"")
    core.step()
    core.discard_steps_in_flight()
    executor.finish("a")
    assert sorted(run(core)) == ["1", "2"]


def test_a_reset_drops_held_requests() -> None:
    core, executor = make()
    executor.abort = lambda: None  # type: ignore[method-assign]
    core.add_request(request("1", "a"), b"")
    core.step()
    core.reset()
    core.check_idle()
    assert not core.has_work


def test_an_adapter_in_use_keeps_its_place_until_its_requests_end() -> None:
    core, executor = make(max_adapters=1)
    core.add_request(request("1", "a"), b"")
    core.step()
    executor.finish("a")
    core.step()
    core.add_request(request("2", "b"), b"")
    while core.scheduler.requests:
        core.step()
        if core.scheduler.requests:
            assert [command.adapter.name for command in executor.commands] == ["a"]
    core.step()
    assert [command.adapter.name for command in executor.commands] == ["a", "b"]
    executor.finish("b")
    assert token_ids(run(core)["2"]) == expected(request("2", "b"))


def test_an_adapter_that_a_replacement_worker_cannot_load_fails_only_its_requests() -> None:
    core, executor = make()
    for id, name in (("1", "a"), ("2", "b"), ("3", "a"), ("4", None)):
        core.add_request(request(id, name), b"client")
    core.step()
    executor.finish("a"), executor.finish("b")
    core.step()
    core.discard_steps_in_flight()
    executor.finish("a", "/secret/a is no folder")
    core.on_repaired()
    (failed,) = core.take_failed()
    assert [output.request_id for output in failed[b"client"]] == ["1", "3"]
    assert {output.stop_reason for output in failed[b"client"]} == {"its folder is no folder"}
    outputs = run(core)
    assert token_ids(outputs["2"]) == expected(request("2", "b")) and "4" in outputs
    core.add_request(request("5", "a"), b"client")
    core.step()
    assert [command.adapter.name for command in executor.commands] == ["a", "b", "a"]


def test_the_ingress_is_notified_before_a_load_and_its_time_counts_as_queued() -> None:
    now = 100.0
    core, executor = make(lambda: now)
    started: list[list[str]] = []
    executor.load_adapter = lambda command: started.append([f"load {command.adapter.name}"])  # type: ignore[method-assign]
    for id, name in (("1", "a"), ("2", "a"), ("3", "b")):
        core.add_request(request(id, name), b"")
    core.step(lambda all: started.append([one.request_id for one in all]))
    assert started == [["1", "2", "3"], ["load a"], ["load b"]]
    now = 107.0
    executor.finish("a"), executor.finish("b")
    outputs = run(core)
    assert outputs["1"][0].queue_s == outputs["3"][0].queue_s == 7.0


def test_loads_in_which_workers_are_lost_count_as_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = make()
    core.add_request(request("1", "a", failed_attempts=MAX_FAILED_ATTEMPTS - 1), b"client")
    core.add_request(request("2", "b"), b"client")
    core.step()

    def lose(wait_s: float) -> list[AdapterLoaded]:
        raise WorkerLost("worker 0")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "loaded_adapters", lose)
        with pytest.raises(WorkerLost):
            core.step()
    ((output,),) = (failed[b"client"] for failed in core.take_failed() if failed)
    assert output.request_id == "1" and "were lost while they loaded it" in output.stop_reason
    core.step()
    executor.finish("b")
    assert token_ids(run(core)["2"]) == expected(request("2", "b"))


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_load_whose_worker_is_lost_outside_a_step_restarts(is_idle: bool) -> None:
    """A load is repeated if its worker is lost outside of a step, while groups form again, or while
    no request waits for the adapter."""
    core, executor = make()
    core.add_request(request("1", "a"), b"")
    core.step()
    if is_idle:
        core.abort_requests(["1"])
    core.discard_steps_in_flight()
    core.on_repaired()
    waiting = "1"
    if is_idle:
        waiting = "2"
        core.add_request(request("2", "a"), b"")
    core.step()
    assert [command.adapter.name for command in executor.commands] == ["a", "a"]
    executor.finish("a")
    assert token_ids(run(core)[waiting]) == expected(request(waiting, "a"))
    core.check_idle()


def test_an_interrupted_load_restarts_after_the_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, executor = make(max_adapters=1)
    executor.abort = lambda: None  # type: ignore[method-assign]

    def interrupt(_command: LoadAdapter) -> None:
        raise KeyboardInterrupt

    core.add_request(request("1", "a"), b"")
    with monkeypatch.context() as patch:
        patch.setattr(executor, "load_adapter", interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    core.reset()
    for id, name in (("2", "a"), ("3", "b")):
        core.add_request(request(id, name), b"")
        core.step()
        executor.finish(name)
        assert token_ids(run(core)[id]) == expected(request(id, name))
    core.check_idle()


def test_an_engine_without_adapters_refuses_adapter_requests() -> None:
    core, _ = make(enabled=False)
    refused = core.add_request(request("1", "a"), b"")
    assert refused is not None and refused.finish_reason is FinishReason.ERROR
    assert "set lora.enabled" in str(refused.stop_reason)
    assert not core.has_work


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": None},
        {"prompt_token_ids": [VOCAB]},
        {"adapter": Adapter("\ud800", "/x", "x")},
        {"adapter": Adapter("x", "/x" * 5000, "x")},
        {"adapter": Adapter("x", "/x", "x" * 5000)},
    ],
)
def test_an_impossible_request_is_refused_without_a_wait(changes: dict[str, object]) -> None:
    core, _ = make()
    refused = core.add_request(request("1", "a", **changes), b"")
    assert refused is not None and refused.finish_reason is FinishReason.ERROR
    assert next(iter(changes)) in str(refused.stop_reason) and not core.has_work
