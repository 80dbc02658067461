"""Requests wait only until their adapter is loaded; adapter slots are reused, and no adapter in use
loses its slot."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.configs.lora import Adapter, LoraConfig
from swell.engine.adapter_admission import LOAD_TIMEOUT_S, AdapterAdmission
from swell.engine.executor.adapter_loads import AdapterLoads
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import AdapterLoaded, LoadAdapter

CONFIG = LoraConfig(enabled=True, max_adapters=2)


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/folders/{name}", f"digest of {name}")


def request(id: str, name: str | None, attempt: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=[1, 2],
        max_tokens=1,
        sampler=SamplerParams(),
        attempt=attempt,
        cache_salt="x",
        adapter=None if name is None else adapter(name),
    )


def loaded(name: str, failure: str = "", rank: int = 0, number: int = 0) -> AdapterLoaded:
    return AdapterLoaded(rank, adapter(name).digest, failure, number)


class Engine:
    """`AdapterAdmission` with a list as its scheduler and with workers whose results the test
    triggers."""

    def __init__(self, config: LoraConfig = CONFIG) -> None:
        self.admission = AdapterAdmission(config)
        self.running: list[EngineCoreRequest] = []
        self.commands: list[LoadAdapter] = []
        self.at_place: dict[int, str] = {}

    def add(self, *ids: str, name: str | None = None) -> None:
        for id in ids:
            one = request(id, name or id[0])
            if not self.admission.hold(one, b"client", 0.0):
                self.running.append(one)
        self.advance()

    def in_use(self) -> set[str]:
        return {one.adapter.digest for one in self.running if one.adapter is not None}

    def advance(self, now: float = 0.0) -> None:
        for held in self.admission.advance(self.in_use, now):
            self.running.append(held.request)
        for command in self.admission.take_commands():
            before = self.at_place.get(command.place)
            assert before not in {one.adapter.name for one in self.running if one.adapter}
            self.at_place[command.place] = command.adapter.name
            self.commands.append(command)

    def load(self, name: str, failure: str = "") -> list[str]:
        failed = self.admission.on_loaded(loaded(name, failure))
        self.advance()
        return [one.held.request.request_id for one in failed]

    def finish(self, id: str) -> None:
        self.running = [one for one in self.running if one.request_id != id]
        self.advance()

    @property
    def ids(self) -> list[str]:
        return [one.request_id for one in self.running]


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    engine = Engine()
    engine.running.append(request("plain", None))
    assert not engine.admission.hold(request("p2", None), b"", 0.0)
    engine.add("a1", "b1", "a2")
    assert engine.ids == ["plain"] and engine.admission.num_held == 3
    assert [command.adapter.name for command in engine.commands] == ["a", "b"]
    assert len({command.place for command in engine.commands}) == 2
    assert engine.load("b") == [] and engine.ids == ["plain", "b1"]
    engine.load("a")
    assert engine.ids == ["plain", "b1", "a1", "a2"]
    engine.add("a3")
    assert engine.ids[-1] == "a3" and len(engine.commands) == 2


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    engine = Engine()
    engine.add("a1", "b1")
    engine.load("a"), engine.load("b")
    engine.finish("a1"), engine.finish("b1")
    engine.add("a2")
    engine.finish("a2")
    engine.add("c1")
    assert engine.at_place == {0: "a", 1: "c"}
    engine.load("c")
    engine.add("d1", "a4")
    assert engine.at_place == {0: "d", 1: "c"}, "c is in use"


def test_a_constantly_requested_adapter_does_not_starve_others() -> None:
    engine = Engine(LoraConfig(enabled=True, max_adapters=1))
    engine.add("a1")
    engine.load("a")
    engine.add("b1", "a2", "a3")
    assert engine.ids == ["a1"] and engine.at_place == {0: "a"}
    engine.finish("a1")
    assert engine.at_place == {0: "b"}
    engine.load("b")
    assert engine.ids == ["b1"]
    engine.finish("b1")
    engine.load("a")
    assert engine.ids == ["a2", "a3"]


def test_a_hanging_folder_does_not_delay_configured_adapters() -> None:
    engine = Engine(LoraConfig(enabled=True, max_adapters=1, adapters={"o": "/o", "p": "/p"}))
    engine.add("o1")
    engine.load("o")
    engine.add("hangs1", "y1", "o2", "p1", name=None)
    assert engine.ids == ["o1", "o2"]
    engine.load("p")
    assert engine.ids == ["o1", "o2", "p1"]
    engine.add("o3", "z1")
    assert engine.ids[-1] == "o3" and engine.admission.num_held == 3
    failed = engine.admission.expire(LOAD_TIMEOUT_S)
    assert [one.held.request.request_id for one in failed] == ["hangs1"]
    engine.advance()
    engine.load("y")
    assert engine.ids[-1] == "y1"


def test_a_failed_load_fails_its_requests_and_the_next_one_retries() -> None:
    engine = Engine()
    engine.add("a1", "b1", "a2", "c1")
    assert engine.load("a", "no such file") == ["a1", "a2"]
    assert [command.adapter.name for command in engine.commands] == ["a", "b", "c"]
    engine.load("c"), engine.load("b")
    assert sorted(engine.ids) == ["b1", "c1"]
    engine.finish("c1")
    engine.add("a3")
    engine.load("a")
    assert sorted(engine.ids) == ["a3", "b1"]


def test_a_load_has_a_deadline() -> None:
    engine = Engine()
    engine.add("a1", "b1")
    engine.load("b")
    assert engine.admission.expire(LOAD_TIMEOUT_S - 1) == []
    (failed,) = engine.admission.expire(LOAD_TIMEOUT_S)
    assert failed.held.request.request_id == "a1"
    assert "adapter 'a': the adapter was not loaded within 120 s" in failed.reason
    assert engine.load("a") == [], "an answer that comes late"
    assert engine.admission.num_held == 0


def test_aborted_requests_and_those_of_a_lost_client_are_dropped() -> None:
    engine = Engine()
    engine.add("a1", "a2", "b1")
    engine.admission.hold(request("a3", "a", attempt=2), b"other", 0.0)
    engine.admission.abort(["a1"])
    engine.admission.abort(["a3"], [1])
    assert engine.admission.waiting_tokens() == 6
    assert [one.request_id for one in engine.admission.abort_client(b"other")] == ["a3"]
    engine.load("a")
    assert engine.ids == ["a2"]


def test_configured_adapters_have_their_own_slots() -> None:
    engine = Engine(LoraConfig(adapters={"s": "/s", "t": "/t"}))
    assert engine.admission.refusal(request("1", None)) is None
    assert engine.admission.refusal(request("2", "s")) is None
    refusal = engine.admission.refusal(request("3", "other"))
    assert refusal is not None and "set lora.enabled" in refusal
    engine.add("s1", "t1")
    engine.load("s"), engine.load("t")
    assert engine.ids == ["s1", "t1"]
    assert sorted(engine.at_place) == [8, 9]


def test_an_engine_without_adapters_refuses_them() -> None:
    refusal = AdapterAdmission(LoraConfig()).refusal(request("1", "a"))
    assert refusal is not None and "adapter 'a'" in refusal


def test_a_load_finishes_when_all_workers_answered() -> None:
    loads = AdapterLoads(3)
    assert loads.answer(loaded("a", number=1)) is None
    assert loads.begin(LoadAdapter(0, adapter("a"))).number == 1
    assert loads.answer(loaded("a", rank=0, number=1)) is None
    assert loads.answer(loaded("a", rank=0, number=1)) is None, "the same one again"
    assert loads.answer(loaded("a", "broken", rank=2, number=1)) is None
    whole = loads.answer(loaded("a", rank=1, number=1))
    assert whole is not None and whole.failure == "broken"
    assert loads.answer(loaded("a", rank=1, number=1)) is None
    assert loads.replace_workers([0]) == [], "it is not loaded"


@pytest.mark.parametrize("place", [0, 1])
def test_a_reply_of_an_abandoned_load_does_not_count_for_the_next_one(place: int) -> None:
    loads = AdapterLoads(2)
    first = loads.begin(LoadAdapter(0, adapter("a")))
    second = loads.begin(LoadAdapter(place, adapter("a")))
    assert loads.answer(loaded("a", "too late", number=first.number)) is None
    assert loads.answer(loaded("a", number=second.number)) is None
    assert loads.answer(loaded("a", "too late", rank=1, number=first.number)) is None
    whole = loads.answer(loaded("a", rank=1, number=second.number))
    assert whole is not None and not whole.failure


def test_replacement_workers_load_the_adapters_and_report_only_failures() -> None:
    loads = AdapterLoads(2)
    numbers = {}
    for place, name in enumerate("abc"):
        numbers[name] = loads.begin(LoadAdapter(place, adapter(name))).number
    for name in "ab":
        assert loads.answer(loaded(name, rank=0, number=numbers[name])) is None
        assert loads.answer(loaded(name, rank=1, number=numbers[name])) is not None
    again = loads.replace_workers([1])
    assert [one.adapter.name for one in again] == ["a", "b"], "c begins again when it is asked for"
    assert loads.missing() == again
    assert loads.answer(loaded("a", rank=1, number=numbers["a"])) is None
    assert [one.adapter.name for one in loads.missing()] == ["b"]
    failed = loads.answer(loaded("b", "gone", rank=1, number=numbers["b"]))
    assert failed is not None and failed.failure == "gone"
    assert loads.missing() == [] and [one.place for one in loads.replace_workers([0])] == [0]


def test_a_load_that_repeatedly_loses_workers_fails_and_others_restart() -> None:
    engine = Engine()
    engine.add("a1", "b1")
    engine.load("b")
    assert engine.ids == ["b1"]
    engine.add("c1")
    for attempt in range(1, MAX_FAILED_ATTEMPTS + 1):
        assert [one.adapter.name for one in engine.commands].count("a") == attempt
        failed = engine.admission.count_failed_attempt()
        engine.advance()
    (one,) = failed
    assert one.held.request.request_id == "a1" and "in a row were lost" in one.reason
    engine.load("c")
    assert engine.ids == ["b1", "c1"], "what waited for a place was no suspect"


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=40))
def test_every_request_runs_eventually(script: list[tuple[str, int]]) -> None:
    """Everything runs eventually, in any order of arrival and completion; `Engine.advance` asserts
    that no adapter in use loses its slot."""
    engine, pending, done = Engine(), deque(script), 0
    for step in range(10 * len(script) + 10):
        if pending:
            name, finished = pending.popleft()
            engine.add(f"{name}{step}")
            for one in engine.running[:finished]:
                engine.finish(one.request_id)
                done += 1
        else:
            for command in engine.commands:
                engine.load(command.adapter.name)
            for one in engine.running.copy():
                engine.finish(one.request_id)
                done += 1
    assert done == len(script) and engine.admission.num_held == 0


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_later_attempt_waits_in_place_of_the_earlier_one(names: list[str]) -> None:
    engine = Engine()
    engine.add(*(f"{name}1" for name in names))
    engine.admission.abort(["a1"], [1])
    engine.admission.hold(request("a1", "a", attempt=2), b"client", 0.0)
    engine.load("a")
    assert [(one.request_id, one.attempt) for one in engine.running] == [("a1", 2)]
