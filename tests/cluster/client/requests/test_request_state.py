"""One request over its attempts: what each engine receives, and when the request fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import RequestOutputCollector, RequestOutputKind
from swell.cluster.client.requests.request_state import (
    MAX_UNREAD_ATTEMPTS,
    EngineGone,
    MigrationReason,
    RequestState,
)
from swell.cluster.client.routing.router import Router
from swell.cluster.control.plan.backoff import MAX_DEATHS
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterView
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import SamplerParams
from tests.cluster.text.tokenizers_for_tests import byte_level
from tests.engine.executor.fake_worker import expected, make_core

ADDRESS = ChannelAddress("", "", "")
DETOKENIZER = Detokenizer(byte_level())
REQUEST = EngineCoreRequest(
    "r", [1, 2], SamplerParams(), max_tokens=9, data_parallel_rank=0, cache_salt="s"
)


def make_router() -> Router:
    router = Router(4)
    router.update(ClusterView(Roster(1, (Member(0, ADDRESS), Member(1, ADDRESS)))))
    return router


def make_state(processor: OutputProcessor, request: EngineCoreRequest = REQUEST) -> RequestState:
    queue = RequestOutputCollector(RequestOutputKind.DELTA)
    return processor.add_request(request, SamplingParams(), queue=queue)


def assign(
    state: RequestState, router: Router, rank: int = 0, now_s: float = 0.0
) -> EngineCoreRequest:
    route = router.choose(state.request_id, state.request.prompt_token_ids, rank=rank)
    state.assign(EngineId(rank, 1), Member(rank, ADDRESS), route, now_s)
    return state.engine_request()


LOSSES = (MigrationReason.DIED, MigrationReason.REPAIRING)


@pytest.mark.parametrize("unread", [True, False])
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("gained", [0, 1])
@pytest.mark.parametrize("reason", list(MigrationReason))
def test_only_a_possible_cause_of_many_losses_is_abandoned(
    reason: MigrationReason, gained: int, started: bool, unread: bool
) -> None:
    """A request that only waited on a lost engine is not a suspect, and lost messages never count
    against a request."""
    is_suspect = started if reason in LOSSES else unread
    most = MAX_FAILED_ATTEMPTS if reason in LOSSES else MAX_UNREAD_ATTEMPTS + 1
    endless = gained or not is_suspect
    state, router, numbers = make_state(OutputProcessor(DETOKENIZER)), make_router(), []
    for attempt in range(40):
        assign(state, router, attempt % 2)
        state.started, state.unread = started, unread
        numbers.append(state.attempt)
        state.output_token_ids += [7] * gained
        if not endless and attempt == most - 1:
            with pytest.raises(EngineGone, match=str(reason)):
                state.unassign(reason)
            break
        state.unassign(reason)
    assert numbers == list(range(1, len(state.ranks) + 1))
    assert not router.own_backlog(1).own_tokens


def test_a_request_can_crash_fewer_engines_than_the_manager_replaces() -> None:
    assert MAX_FAILED_ATTEMPTS < MAX_DEATHS


def test_the_first_attempt_is_the_request_itself() -> None:
    assert assign(make_state(OutputProcessor(DETOKENIZER)), make_router()) is REQUEST


def test_a_later_attempt_continues_after_the_outputs_on_any_engine() -> None:
    processor, router = OutputProcessor(DETOKENIZER), make_router()
    state = make_state(processor)
    assign(state, router)
    processor.process_outputs([EngineCoreOutput("r", [5, 6])])
    state.unassign(MigrationReason.DIED)
    processor.process_outputs([EngineCoreOutput("r", [7])])  # late
    assert assign(state, router, 1) == replace(
        REQUEST, output_token_ids=[5, 6], data_parallel_rank=None, attempt=2
    )
    late = [EngineCoreOutput("r", [8]), EngineCoreOutput("r", [], FinishReason.ABORT)]
    result = processor.process_outputs([*late, EngineCoreOutput("r", [9], attempt=2)])
    assert result.dropped == [] and state.output_token_ids == [5, 6, 9]
    dropped = EngineCoreOutput("r", [], FinishReason.ABORT, attempt=2)
    assert processor.process_outputs([dropped]).dropped == [state]
    assert processor.find("r", 2) is state and processor.find("r", 1) is None


def test_a_later_attempt_carries_the_waiting_time_so_far() -> None:
    """The time counts from the arrival of the request and includes earlier attempts."""
    now_s = 100.0
    processor, router = OutputProcessor(DETOKENIZER, clock=lambda: now_s), make_router()
    state = make_state(processor)
    for at_s, waited_s in ((101.0, 0.0), (130.0, 30.0), (175.5, 75.5)):
        assert assign(state, router, now_s=at_s).waited_s == waited_s
        state.unassign(MigrationReason.LEFT)


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(["step", "receive", "move", "abort late"]), st.integers(0, 1)),
        max_size=40,
    ),
    depth=st.integers(1, 3),
)
def test_stale_messages_never_mix_answers_of_two_engines(
    script: list[tuple[str, int]], depth: int
) -> None:
    """A client moves its request between two engines, or back to the same one. Outputs and aborts
    may be delayed arbitrarily, and may arrive after a request that was sent later."""
    whole = EngineCoreRequest("r", [1, 2, 3], SamplerParams(), max_tokens=9)
    cores = [make_core(steps_in_flight=depth) for _ in range(2)]
    processor, router = OutputProcessor(DETOKENIZER), make_router()
    state = make_state(processor, whole)
    outputs: list[list[EngineCoreOutput]] = [[], []]
    aborts: list[list[int]] = [[], []]

    def send(rank: int) -> None:
        assert cores[rank].add_request(assign(state, router, rank), b"c") is None

    def receive(rank: int) -> None:
        processor.process_outputs(outputs[rank])
        outputs[rank].clear()

    def step(rank: int) -> None:
        for answers in cores[rank].step().values():
            outputs[rank] += answers

    send(0)
    for event, rank in script:
        if state.finish_reason is not None:
            break
        match event:
            case "step":
                step(rank)
            case "receive":
                receive(rank)
            case "abort late":
                cores[rank].abort_requests(["r"] * len(aborts[rank]), aborts[rank])
                aborts[rank].clear()
            case "move":
                assert state.engine is not None
                aborts[state.engine.rank].append(state.attempt)
                state.unassign(MigrationReason.LEFT)
                send(rank)
    while any(core.has_work for core in cores):
        for rank in range(2):
            step(rank)
            receive(rank)
    assert state.output_token_ids == expected(whole)
    assert not processor.request_states
    assert sum(router.own_backlog(1)) == 0
    for core in cores:
        core.check_idle()


def test_the_first_token_of_each_attempt_marks_its_prompt_as_computed() -> None:
    processor, router = OutputProcessor(DETOKENIZER), make_router()
    state = make_state(processor)
    for attempt, cached in ((1, 1), (2, 0)):
        route = router.choose(state.request_id, REQUEST.prompt_token_ids)
        state.assign(EngineId(route.rank, 1), Member(route.rank, ADDRESS), route, 0.0)
        assert route.uncomputed_tokens
        for _ in range(2):
            output = EngineCoreOutput("r", [3], num_cached_tokens=cached, attempt=attempt)
            processor.process_outputs([output])
            assert not route.uncomputed_tokens
        state.unassign(MigrationReason.DIED)
    assert state.num_cached_tokens == 1
