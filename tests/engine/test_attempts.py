"""Attempts of one request at the same engine: only the newest runs, and every output has its
attempt number."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import Extra, PromptLogprobs, SamplerParams
from swell.worker.wire import ModelRunnerOutput
from tests.engine.executor.fake_worker import expected, make_core, regroup, run

CLIENT, SAME_CLIENT_AGAIN = b"ingress", b"ingress, over a new connection"
TOKENS = 12
WHOLE = EngineCoreRequest("r", [1, 2, 3], SamplerParams(), max_tokens=TOKENS)
ANSWER = expected(WHOLE)


def request(attempt: int, given: Iterable[int] = ()) -> EngineCoreRequest:
    """Returns the attempt that continues after the given tokens."""
    return EngineCoreRequest(
        "r",
        WHOLE.prompt_token_ids,
        WHOLE.sampler,
        TOKENS,
        output_token_ids=list(given),
        attempt=attempt,
    )


def of_attempt(outputs: list[EngineCoreOutput], attempt: int) -> list[int]:
    return [t for o in outputs if o.attempt == attempt for t in o.new_token_ids]


@pytest.mark.parametrize("client", [CLIENT, SAME_CLIENT_AGAIN])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_later_attempt_replaces_one_whose_abort_was_lost(client: bytes, steps: int) -> None:
    core = make_core(steps_in_flight=3)
    assert core.add_request(request(1), CLIENT) is None
    first = [output for _ in range(steps) for output in core.step().get(CLIENT, [])]
    assert core.add_request(request(2, ANSWER[:1]), client) is None
    later = run(core)["r"]
    assert {output.attempt for output in first} <= {1}
    assert {output.attempt for output in later} == {2}
    assert of_attempt(later, 2) == ANSWER[1:]
    core.check_idle()


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_not_newer_is_refused_with_its_number(attempt: int) -> None:
    core = make_core()
    assert core.add_request(request(2), CLIENT) is None
    refused = core.add_request(request(attempt), CLIENT)
    assert refused is not None and "already being served" in str(refused.stop_reason)
    assert refused.attempt == attempt
    assert of_attempt(run(core)["r"], 2) == ANSWER


def test_an_abort_ends_its_attempt_and_no_later_one() -> None:
    core = make_core()
    core.add_request(request(2), CLIENT)
    core.abort_requests(["unknown", "r"], [9, 1])
    assert core.has_work
    core.abort_requests(["r"], [2])
    assert not core.scheduler.has_requests
    core.add_request(request(3), CLIENT)
    core.abort_requests(["r"])
    core.check_idle()


def test_every_last_output_has_the_attempt_number() -> None:
    core = make_core()
    empty = EngineCoreRequest("r", [], SamplerParams(), TOKENS, attempt=4)
    answer = core.add_request(empty, CLIENT)
    assert answer is not None and (answer.finish_reason, answer.attempt) == (FinishReason.ERROR, 4)
    complete = core.add_request(request(5, ANSWER), CLIENT)
    assert complete is not None
    assert (complete.finish_reason, complete.attempt) == (FinishReason.LENGTH, 5)
    core.add_request(request(6), CLIENT)
    assert [(r.request_id, r.attempt) for r in core.abort_client(CLIENT)] == [("r", 6)]
    core.check_idle()


def test_outputs_without_tokens_have_the_attempt_number() -> None:
    core = make_core(max_tokens_per_step=2, steps_in_flight=1)
    core.add_request(request(3), CLIENT)
    step = core.scheduler.schedule()
    assert step is not None and step.plan.samples == [False]
    extras: list[Extra] = [PromptLogprobs(1, [[1]], [[0.0]], [1])]
    result = ModelRunnerOutput(step.plan.step, extras={0: extras})
    (output,) = core.scheduler.update(step, result)[CLIENT]
    assert (output.extras, output.attempt) == (extras, 3)
    step = core.scheduler.schedule()
    assert step is not None
    failed = ModelRunnerOutput(step.plan.step, [0], failed={0: "its own fault"})
    (output,) = core.scheduler.update(step, failed)[CLIENT]
    assert (output.finish_reason, output.attempt) == (FinishReason.ERROR, 3)
    core.check_idle()


@settings(max_examples=200, deadline=None)
@given(
    script=st.lists(
        st.sampled_from(["step", "move", "move, abort lost", "late abort", "steps lost"]),
        max_size=40,
    ),
    depth=st.integers(1, 4),
    num_blocks=st.integers(6, 20),
)
def test_the_client_matches_outputs_only_by_attempt_number(
    script: list[str], depth: int, num_blocks: int
) -> None:
    """A client that accepts only the outputs of its current attempt receives every token once, also
    if outputs are lost or late. An output reaches the client one step late, so the request may move
    meanwhile."""
    core = make_core(steps_in_flight=depth, num_blocks=num_blocks, max_model_len=24)
    attempt, given, on_the_way = 1, list[int](), list[EngineCoreOutput]()
    assert core.add_request(request(attempt), CLIENT) is None

    def step() -> None:
        given.extend(of_attempt(on_the_way, attempt))
        on_the_way[:] = [o for outputs in core.step().values() for o in outputs]

    for event in script:
        if len(given) == TOKENS:
            break
        match event:
            case "step":
                step()
            case "steps lost":
                regroup(core)
            case "late abort":
                core.abort_requests(["r"], [attempt - 1])
            case _:
                if event == "move":
                    core.abort_requests(["r"], [attempt])
                attempt += 1
                answer = core.add_request(request(attempt, given), CLIENT)
                assert answer is None
    while core.has_work:
        step()
    step()
    assert given == ANSWER
    core.check_idle()
