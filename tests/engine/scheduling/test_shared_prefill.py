"""A common prefix of requests is computed once, also if they arrive together."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.core import EngineCore
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.engine.conservation import check_blocks
from tests.engine.executor.fake_worker import expected, make_core, regroup, run, token_ids

CLIENT = b"ingress"
BLOCK = 4


def request(name: str, prompt: list[int], max_tokens: int = 1, **extra: object):
    extra.setdefault("sampler", SamplerParams())
    return EngineCoreRequest(name, prompt, max_tokens=max_tokens, **extra)


def siblings(count: int, prompt: list[int], max_tokens: int = 1, **extra: object):
    return [
        request(f"r{i}", prompt, max_tokens, sampler=SamplerParams(seed=i), **extra)
        for i in range(count)
    ]


def add(core: EngineCore, wanted: Iterable[EngineCoreRequest]) -> None:
    for one in wanted:
        assert core.add_request(one, CLIENT) is None


def computed_prompt_tokens(core: EngineCore, prompt_tokens: int) -> int:
    """Returns the number of computed prompt tokens over all steps; every prompt has this length."""
    return sum(
        max(0, min(start + count, prompt_tokens) - start)
        for plan in core.executor.plans
        for start, count in zip(plan.starts, plan.num_tokens, strict=True)
    )


def in_common(one: list[int], other: list[int]) -> int:
    """Returns the number of full blocks at the start of both."""
    count = 0
    while (
        len(one[: BLOCK * (count + 1)]) == BLOCK * (count + 1)
        and one[: BLOCK * (count + 1)] == other[: BLOCK * (count + 1)]
    ):
        count += 1
    return count


def computed_at_least(prompts: list[list[int]]) -> list[int]:
    """Returns the reference cost of each prompt in tokens if it shares the prefixes of all earlier
    prompts."""
    costs = []
    for index, prompt in enumerate(prompts):
        shared = max((in_common(prompt, earlier) for earlier in prompts[:index]), default=0)
        costs.append(len(prompt) - BLOCK * min(shared, (len(prompt) - 1) // BLOCK))
    return costs


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("budget", "chunk"), [(2048, 0), (300, 0), (2048, 100), (64, 7)])
def test_n_answers_compute_their_prompt_once(budget, chunk, depth):
    core = make_core(
        num_blocks=200,
        max_model_len=1100,
        block_tokens=16,
        max_tokens_per_step=budget,
        max_chunk_tokens=chunk,
        steps_in_flight=depth,
    )
    prompt = [i * i % 47 for i in range(1000)]
    wanted = siblings(8, prompt, 12)
    add(core, wanted)
    outputs = run(core)
    for one in wanted:
        assert token_ids(outputs[one.request_id]) == expected(one)
    tail = 1000 - 62 * 16
    assert computed_prompt_tokens(core, 1000) == 1000 + 7 * tail
    assert outputs["r7"][0].num_cached_tokens == 62 * 16
    core.check_idle()


def test_n_answers_share_the_blocks_of_their_prompt():
    core = make_core(num_blocks=64, max_model_len=64, steps_in_flight=1)
    add(core, siblings(8, list(range(41)), 3))
    core.step()
    core.step()
    pool = core.scheduler.kv.pool
    assert len(core.scheduler.running) == 8
    assert pool.num_blocks - pool.num_free == 10 + 8


stems = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=3).map(
    lambda parts: [token for part in parts for token in [part[0]] * len(part)]
)


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(stems, min_size=1, max_size=10),
    budget=st.sampled_from([1, 7, 1000]),
    chunk=st.sampled_from([0, 1, 3, 6]),
    depth=st.integers(1, 3),
    max_rows=st.sampled_from([1, 2, 3, 16]),
)
def test_a_burst_computes_each_common_block_once(prompts, budget, chunk, depth, max_rows):
    core = make_core(
        num_blocks=200,
        max_tokens_per_step=budget,
        max_chunk_tokens=chunk,
        steps_in_flight=depth,
        max_rows=max_rows,
    )
    add(core, (request(f"r{i}", prompt) for i, prompt in enumerate(prompts)))
    outputs = run(core)
    costs = [
        len(prompt) - outputs[f"r{i}"][0].num_cached_tokens for i, prompt in enumerate(prompts)
    ]
    assert costs == computed_at_least(prompts)
    assert sum(sum(plan.num_tokens) for plan in core.executor.plans) == sum(costs)
    core.check_idle()


families = st.builds(
    lambda stem, length, count, **extra: [
        request("?", (stem * 40)[:length], sampler=SamplerParams(seed=i), **extra)
        for i in range(count)
    ],
    st.sampled_from([[1], [1, 1, 1, 1, 2], [2, 1]]),
    st.integers(1, 30),
    st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from([None, "a"]),
    skip_prefix_cache=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), families), min_size=1, max_size=5),
    num_blocks=st.integers(10, 40),
    budget=st.sampled_from([3, 16, 1000]),
    chunk=st.sampled_from([0, 1, 5]),
    depth=st.integers(1, 3),
    max_rows=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority"]),
    aborts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24)), max_size=4),
    losses=st.sets(st.integers(0, 30), max_size=2),
)
def test_every_request_that_waits_for_a_prefix_finishes(
    arrivals, num_blocks, budget, chunk, depth, max_rows, policy, aborts, losses
):
    """Every request gets the right tokens, also if its prefix leader is aborted or preempted."""
    core = make_core(
        num_blocks=num_blocks,
        max_model_len=38,
        max_tokens_per_step=budget,
        max_chunk_tokens=chunk,
        steps_in_flight=depth,
        max_rows=max_rows,
        policy=policy,
    )
    wanted: dict[str, EngineCoreRequest] = {}
    due: list[tuple[int, str]] = []
    for at, family in arrivals:
        for one in family:
            name = f"r{len(wanted)}"
            fields = {f: getattr(one, f) for f in one.__struct_fields__}
            wanted[name] = EngineCoreRequest(**{**fields, "request_id": name})
            due.append((at, name))
    outputs: dict[str, list] = {name: [] for name in wanted}
    clock = 0
    while core.has_work or any(at >= clock for at, _ in due):
        add(core, (wanted[name] for at, name in due if at == clock))
        core.abort_requests([f"r{i}" for i, at in aborts if at == clock])
        if clock in losses:
            regroup(core)
            core.scheduler.kv.check_idle()
        for answer in core.step().get(CLIENT, []):
            outputs[answer.request_id].append(answer)
        check_blocks(core.scheduler.kv.pool)
        clock += 1
        assert clock < 3000, "no progress"
    core.check_idle()
    aborted = {f"r{i}" for i, _ in aborts}
    for name, one in wanted.items():
        tokens = token_ids(outputs[name])
        assert tokens == expected(one)[: len(tokens)]
        assert name in aborted or len(tokens) == one.max_tokens


# ---------------------------------------------------------------- which requests wait


def rows(core: EngineCore, step: int = -1) -> list[int]:
    return core.executor.plans[step].num_tokens


def test_a_request_without_a_common_prefix_starts_together_with_the_leader():
    core = make_core(steps_in_flight=1, max_model_len=64)
    add(core, siblings(3, [1] * 20))
    add(core, [request("other", [2] * 9), request("short", [1] * 3)])
    core.step()
    assert rows(core) == [3, 9, 20]
    core.step()
    assert rows(core) == [4, 4]


def test_a_follower_keeps_its_claim_on_a_slot():
    core = make_core(steps_in_flight=1, max_rows=3, max_chunk_tokens=8)
    add(core, [*siblings(2, [1] * 20, 8), request("b", [2] * 5, 8), request("c", [3] * 5, 8)])
    core.step()
    assert rows(core) == [5, 8], "b has the third slot, and c none"
    core.step()
    core.step()
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["r0", "r1", "b"]


@pytest.mark.parametrize(("late_tokens", "expected_rows"), [(12, [8, 8]), (16, [8])])
def test_a_follower_keeps_its_claim_on_blocks(late_tokens, expected_rows):
    """A follower keeps its claim on the blocks after the common ones. Of 11 blocks, `first` holds 5
    and may want 1 more, and `long` will need 2 of its own: 3 are left."""
    core = make_core(num_blocks=11, max_model_len=44, steps_in_flight=1, max_chunk_tokens=8)
    first, long = request("first", [1] * 20), request("long", [1] * 20 + [2] * 8)
    add(core, [first, long, request("late", [3] * late_tokens)])
    core.step()
    assert rows(core) == expected_rows
    core.abort_requests(["long"])
    core.step()
    assert rows(core) == ([4, 8] if expected_rows == [8, 8] else [8, 8])


def test_no_request_waits_for_one_that_is_scheduled_later():
    core = make_core(policy="priority", max_chunk_tokens=4, steps_in_flight=1)
    add(core, [request("low", [1] * 24, priority=5)])
    core.step()
    add(core, siblings(2, [1] * 24, priority=1))
    core.step()
    assert rows(core) == [4, 4], "one goes ahead of low, its sibling follows it"
    outputs = run(core)
    assert [outputs[name][0].num_cached_tokens for name in ("r0", "r1", "low")] == [4, 20, 0]


@pytest.mark.parametrize(
    ("caching", "skip"), [(False, False), (True, True)], ids=["cache off", "cache skipped"]
)
def test_without_the_prefix_cache_no_request_waits(caching, skip):
    core = make_core(steps_in_flight=1, prefix_caching=caching)
    add(core, siblings(3, [1] * 20, skip_prefix_cache=skip))
    core.step()
    assert rows(core) == [20, 20, 20]


def test_requests_with_different_salts_share_nothing():
    core = make_core(steps_in_flight=1)
    add(core, [request(f"r{i}", [1] * 20, cache_salt=salt) for i, salt in enumerate("aab")])
    core.step()
    assert rows(core) == [20, 20]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_follower_takes_over_the_blocks_of_an_aborted_leader(steps):
    core = make_core(steps_in_flight=1, max_chunk_tokens=8)
    add(core, siblings(3, [1] * 40, 4))
    for _ in range(steps):
        core.step()
    core.abort_requests(["r0"])
    outputs = run(core)
    assert outputs["r1"][0].num_cached_tokens == 8 * steps
    assert outputs["r2"][0].num_cached_tokens == 36
    assert computed_prompt_tokens(core, 40) == 40 + 4
    core.check_idle()


def test_a_follower_continues_when_its_leader_is_preempted():
    """A follower continues when its leader is preempted: r0 decodes and takes the blocks of lead,
    so lead no longer computes the prefix."""
    core = make_core(num_blocks=12, max_model_len=48, steps_in_flight=1, max_chunk_tokens=2)
    wanted = [
        request("r0", [2] * 12, 20),
        request("lead", [1] * 24, 4),
        request("tail", [1] * 24, 4, sampler=SamplerParams(seed=1)),
    ]
    add(core, wanted)
    outputs = run(core)
    assert core.scheduler.num_preemptions > 0
    for one in wanted:
        assert token_ids(outputs[one.request_id]) == expected(one)
    assert outputs["tail"][0].num_cached_tokens == 20
    core.check_idle()


def test_waiting_needs_one_lookup_per_step(monkeypatch):
    """A waiting request looks its prefix up when its leader has made progress, not at every
    step."""
    core = make_core(num_blocks=64, max_model_len=200, max_chunk_tokens=1, steps_in_flight=1)
    searches = []
    find = core.scheduler.kv._find
    monkeypatch.setattr(core.scheduler.kv, "_find", lambda names: searches.append(1) or find(names))
    add(core, siblings(8, [1] * 100))
    run(core)
    assert core.num_steps >= 100
    assert 8 <= len(searches) <= 3 * 8
