"""The engine core against the reference output, over every way to schedule the requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.coordinator.transport.runtime import THREADS, drive
from swell.engine.wire import EngineCoreRequest, FinishReason, JourneyEvent
from swell.engine.wire import JourneyEventType as Kind
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import GroupPlan
from tests.engine.conservation import check_blocks
from tests.engine.drafts.planted_drafts import KINDS, plant
from tests.engine.executor.fake_worker import expected, make_core, regroup, run, token_ids

CLIENT = b"ingress"


def request(name: str, prompt: list[int], max_tokens: int = 8, **extra: object):
    extra.setdefault("sampler", SamplerParams())
    return EngineCoreRequest(name, prompt, max_tokens=max_tokens, **extra)


SEVERAL = "four steps per plan"
DRAFTS = {
    None: {},
    SEVERAL: {},
    "model": {"method": "model", "model": {"path": "small"}, "max_tokens": 5},
}
"""The draft settings; the test plants the proposers of the other methods."""
requests = st.builds(
    request,
    st.just("?"),
    # Few distinct tokens and a common prefix, so that prefixes are shared often.
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 20).map(lambda n: [1] * n),
    ),
    st.integers(1, 12),
    sampler=st.builds(SamplerParams, seed=st.integers(0, 1)),
    eos_token_ids=st.sampled_from([[], [3], list(range(10))]),
    stop_token_ids=st.sampled_from([[], [7, 8]]),
    min_tokens=st.integers(0, 4),
    output_token_ids=st.sampled_from([[], [5], [9, 9, 9]]),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from([None, "a"]),
)


@settings(max_examples=300, deadline=None)
@given(
    wanted=st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=12),
    num_blocks=st.integers(10, 30),
    budget=st.sampled_from([1, 7, 1000]),
    chunk=st.sampled_from([0, 1, 3]),
    depth=st.integers(1, 4),
    max_rows=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30)), max_size=3),
    losses=st.sets(st.integers(0, 30), max_size=4),
    offload=st.tuples(st.sampled_from([0, 0, 1, 3, 20]), st.sampled_from([0, 0, 2, 20])),
    drafts=st.sampled_from([None, "model", SEVERAL, *KINDS]),
)
def test_answers_do_not_depend_on_the_schedule_nor_on_lost_steps(
    wanted,
    num_blocks,
    budget,
    chunk,
    depth,
    max_rows,
    policy,
    prefix_caching,
    aborts,
    losses,
    offload,
    drafts,
):
    core = make_core(
        num_blocks=num_blocks,
        max_model_len=36,
        max_tokens_per_step=budget,
        max_chunk_tokens=chunk,
        steps_in_flight=depth,
        max_rows=max_rows,
        policy=policy,
        prefix_caching=prefix_caching,
        offload_blocks=offload,
        drafts=DRAFTS.get(drafts, {"method": "ngram", "max_tokens": 5}),
        steps_per_plan=4 if drafts == SEVERAL else 1,
    )
    if drafts in KINDS:
        plant(core, drafts, expected)
    arrivals = [
        (at, request(**{**_fields(r), "name": f"r{i}"})) for i, (r, at) in enumerate(wanted)
    ]
    aborted = {f"r{i}": at for i, at in aborts}
    outputs: dict[str, list] = {}
    clock = 0
    while arrivals or core.has_work:
        for _at, r in [a for a in arrivals if a[0] <= clock]:
            answer = core.add_request(r, CLIENT)
            if answer is not None:
                outputs[r.request_id] = [answer]
        arrivals = [a for a in arrivals if a[0] > clock]
        core.abort_requests([name for name, at in aborted.items() if at == clock])
        if clock in losses:
            regroup(core)
            core.scheduler.kv.pool.check_idle()
        for client, answers in core.step().items():
            assert client == CLIENT
            for answer in answers:
                outputs.setdefault(answer.request_id, []).append(answer)
        clock += 1
        assert clock < 5000, "no progress"
    core.check_idle()
    check_blocks(core.scheduler.kv.pool)
    if drafts == "model":
        assert core.scheduler.drafter.num_drafts == core.scheduler.drafter.num_accepted
    for i, (r, _) in enumerate(wanted):
        got = outputs.get(f"r{i}", [])
        tokens = list(r.output_token_ids) + token_ids(got)
        if f"r{i}" in aborted:
            assert tokens == expected(r)[: len(tokens)] or got[-1].finish_reason is not None
        elif len(r.output_token_ids) >= r.max_tokens:
            assert [o.finish_reason for o in got] == [FinishReason.LENGTH]
        else:
            assert tokens == expected(r)
            assert [o.finished for o in got] == [False] * (len(got) - 1) + [True]


def _fields(r: EngineCoreRequest) -> dict:
    names = ("max_tokens", "sampler", "eos_token_ids", "stop_token_ids", "min_tokens")
    more = ("output_token_ids", "priority", "cache_salt")
    return {"prompt": r.prompt_token_ids, **{n: getattr(r, n) for n in names + more}}


def test_each_end_has_its_finish_reason():
    core = make_core()
    long = request("long", [1, 2], 5)
    outputs = expected(long)
    core.add_request(long, CLIENT)
    core.add_request(request("eos", [1, 2], 5, eos_token_ids=[outputs[2]]), CLIENT)
    core.add_request(request("stop", [1, 2], 5, stop_token_ids=[outputs[1]]), CLIENT)
    last = {name: answers[-1] for name, answers in run(core).items()}
    assert (last["long"].finish_reason, last["long"].stop_reason) == (FinishReason.LENGTH, None)
    assert (last["eos"].finish_reason, last["eos"].stop_reason) == (FinishReason.STOP, None)
    assert (last["stop"].finish_reason, last["stop"].stop_reason) == (FinishReason.STOP, outputs[1])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("r", [], 4), "no tokens"),
        (request("r", [1] * 60, 5), "maximum context length of 64"),
    ],
)
def test_a_request_that_can_never_run_is_answered_at_once(bad, words):
    core = make_core()
    answer = core.add_request(bad, CLIENT)
    assert answer is not None
    assert answer.finish_reason is FinishReason.ERROR
    assert words in answer.stop_reason
    core.check_idle()


def test_a_duplicate_id_is_refused_and_the_first_request_continues():
    core = make_core()
    first = request("r", [1, 2, 3], 4)
    assert core.add_request(first, CLIENT) is None
    second = core.add_request(request("r", [1], 4), CLIENT)
    assert second is not None
    assert "already" in second.stop_reason
    assert token_ids(run(core)["r"]) == expected(first)


def test_a_shared_prefix_is_computed_once_and_its_last_token_again():
    core = make_core(block_tokens=4)
    prompt = list(range(12))
    core.add_request(request("cold", prompt, 1), CLIENT)
    cold = run(core)["cold"][0]
    core.add_request(request("warm", prompt, 1), CLIENT)
    warm = run(core)["warm"][0]
    core.add_request(request("salted", prompt, 1, cache_salt="x"), CLIENT)
    salted = run(core)["salted"][0]
    assert [o.num_cached_tokens for o in (cold, warm, salted)] == [0, 8, 0]
    assert [sum(p.num_tokens) for p in core.executor.plans] == [12, 4, 12]


def test_the_least_recently_used_prefix_is_evicted_first():
    core = make_core(num_blocks=6, max_model_len=24, block_tokens=4)
    for name, first in (("a", 1), ("b", 2), ("a2", 1), ("c", 3)):
        core.add_request(request(name, [first] * 9, 1), CLIENT)
        run(core)
    core.add_request(request("a3", [1] * 9, 1), CLIENT)
    assert run(core)["a3"][0].num_cached_tokens == 8


def test_a_full_cache_preempts_the_last_and_all_requests_finish():
    core = make_core(num_blocks=9, max_model_len=36, block_tokens=4, prefix_caching=False)
    wanted = [request(f"r{i}", [i] * 6, 20) for i in range(3)]
    for r in wanted:
        core.add_request(r, CLIENT)
    outputs = run(core)
    assert core.scheduler.num_preemptions > 0
    assert outputs["r0"][-1].num_preemptions == 0
    for r in wanted:
        assert token_ids(outputs[r.request_id]) == expected(r)
    core.check_idle()


def test_each_start_of_a_request_reports_what_happened_since_the_one_before():
    core = make_core(num_blocks=9, max_model_len=36, block_tokens=4, prefix_caching=False)
    reports: dict[str, list[JourneyEvent]] = {f"r{i}": [] for i in range(3)}

    def on_start(started):
        for one in started:
            reports[one.request_id] += one.events

    for name in reports:
        core.add_request(request(name, [int(name[1])] * 6, 20), CLIENT)
    outputs = run(core, on_start)
    again = [Kind.PREEMPTED, Kind.SCHEDULED]
    for name, events in reports.items():
        count = outputs[name][-1].num_preemptions
        assert [e.kind for e in events] == [Kind.QUEUED, Kind.SCHEDULED, *again * count]
        times = [e.since_arrival_s for e in events]
        assert times == sorted(times)
        assert times[0] == 0
    assert any(len(events) > 2 for events in reports.values())


def test_priority_decides_which_request_starts():
    core = make_core(max_rows=1, policy="priority", steps_in_flight=1)
    for name, priority in (("low", 5), ("high", -1), ("middle", 0)):
        core.add_request(request(name, [1], 2, priority=priority), CLIENT)
    assert list(run(core)) == ["high", "middle", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_comes_from_another_engine_keeps_its_place(policy):
    """A request that comes from another engine is queued by its arrival at the ingress, after all
    requests with a higher priority."""
    core = make_core(max_rows=1, policy=policy, steps_in_flight=1)
    first = -1 if policy == "priority" else 0
    core.add_request(request("high", [1], 2, priority=first), CLIENT)
    core.add_request(request("new", [1], 2), CLIENT)
    core.add_request(request("old", [1], 4, output_token_ids=[5], attempt=2, waited_s=60), CLIENT)
    core.add_request(request("oldest", [1], 2, attempt=3, waited_s=61), CLIENT)
    names = (
        ["oldest", "old", "high", "new"] if policy == "fcfs" else ["high", "oldest", "old", "new"]
    )
    assert list(run(core)) == names


def test_a_suspect_does_not_keep_its_place():
    core = make_core(max_rows=1, steps_in_flight=1)
    core.add_request(request("new", [1], 2), CLIENT)
    core.add_request(request("suspect", [1], 2, attempt=2, failed_attempts=1, waited_s=60), CLIENT)
    assert list(run(core)) == ["new", "suspect"]


def test_a_running_request_is_not_preempted_for_an_older_one():
    core = make_core(max_rows=1, steps_in_flight=1)
    core.add_request(request("runs", [1], 6), CLIENT)
    core.step()
    core.add_request(request("old", [1], 6, attempt=2, waited_s=60), CLIENT)
    outputs = run(core)
    assert list(outputs) == ["runs", "old"]
    assert outputs["runs"][-1].num_preemptions == 0


def test_an_abort_during_the_step_holds_for_that_step():
    core = make_core(steps_in_flight=2)
    core.add_request(request("r", [1, 2, 3], 20), CLIENT)
    core.step()

    async def abort() -> None:
        core.abort_requests(["r"])

    assert drive(core.step_on(THREADS, abort)) == {}
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    run(core)
    core.check_idle()


def test_decode_rows_come_first():
    """Decode rows come first, also those that the policy puts after a prompt."""
    core = make_core(steps_in_flight=1, max_chunk_tokens=4)
    core.add_request(request("prompt", [2] * 12, 6), CLIENT)
    core.add_request(request("decodes", [1], 6), CLIENT)
    core.step()
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["prompt", "decodes"]
    assert core.executor.plans[-1].num_tokens == [1, 4]


def test_outputs_go_to_the_ingress_that_sent_the_request():
    core = make_core()
    core.add_request(request("a", [1], 3), b"one")
    core.add_request(request("b", [2], 3), b"two")
    seen = set()
    while core.has_work:
        for client, answers in core.step().items():
            seen |= {(client, answer.request_id) for answer in answers}
    assert seen == {(b"one", "a"), (b"two", "b")}


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    """A preempted request waits for its tokens in flight: the host cannot send the worker a token
    that it has not read."""
    core = make_core(
        num_blocks=9, max_model_len=36, block_tokens=4, prefix_caching=False, steps_in_flight=4
    )
    wanted = [request(f"r{i}", [i] * 11, 20) for i in range(2)]
    for r in wanted:
        core.add_request(r, CLIENT)
    outputs: dict[str, list] = {}
    while not core.scheduler.num_preemptions:
        for answer in core.step().get(CLIENT, []):
            outputs.setdefault(answer.request_id, []).append(answer)
    assert core.scheduler.requests["r1"].pending > 0, "the case under test"
    core.abort_requests(["r0"])
    rest = run(core)["r1"]
    assert token_ids(outputs["r1"] + rest) == expected(wanted[1])


def test_blocks_of_lost_steps_are_never_found_again():
    core = make_core(block_tokens=4)
    core.add_request(request("lost", [1] * 12, 4), CLIENT)
    core.step()
    regroup(core)
    core.abort_requests(["lost"])
    core.add_request(request("later", [1] * 12, 4), CLIENT)
    assert run(core)["later"][0].num_cached_tokens == 0
    core.add_request(request("last", [1] * 12, 4), CLIENT)
    assert run(core)["last"][0].num_cached_tokens == 8, "block hashes are assigned again"


def test_lost_requests_keep_their_order():
    core = make_core(max_rows=2, policy="priority", steps_in_flight=3)
    for name, priority in (("last", 5), ("second", 1), ("first", 0)):
        core.add_request(request(name, [1, 2], 6, priority=priority), CLIENT)
    core.step()
    regroup(core)
    assert core.scheduler.num_waiting == 3
    assert list(run(core)) == ["first", "second", "last"]
    core.check_idle()


def test_groups_that_keep_their_caches_keep_computed_blocks():
    core = make_core(steps_in_flight=1)
    wanted = request("r", [1] * 9, 6)
    core.add_request(wanted, CLIENT)
    first = core.step()[CLIENT]
    core.regroup(GroupPlan(generation=0, keep_states=True))
    assert token_ids(first + run(core)["r"]) == expected(wanted)
    assert sum(sum(plan.num_tokens) for plan in core.executor.plans) == 9 + 5
