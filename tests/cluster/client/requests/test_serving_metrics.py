"""Every serving metric against scripted runs: each number in `/metrics` equals what happened.

A request is one child of an answer, as in vLLM: `n` answers to a prompt are `n` requests. Its queue
time lasts from its arrival at the ingress until it is first scheduled on the engine that produced
its first token. A request without any token gets neither a prefill time nor a decode time.
"""

from __future__ import annotations

import pytest

from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.client.routing.router import NoEngine
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.coordinator.roster import MemberState
from tests.cluster.client.scripted_cluster import ScriptedCluster, run

PROMPT = list(range(1, 9))  # two blocks of 4 tokens
CLUSTER = ("epoch", "engines", "engine_steps_total", "rescale_phase", "upgrade_phase")
"""Metrics that every run shows in addition to the serving metrics."""


def serving(scenario, **settings: object) -> dict[str, float]:
    shown = run(scenario, **settings)
    return {name: value for name, value in shown.items() if name not in CLUSTER}


def finished(reason: str, count: int = 1, **values: float) -> dict[str, float]:
    """Returns the metrics of `count` requests of 8 prompt tokens that ran to completion. `values`
    are the sums of their times and tokens."""
    times = {
        "time_to_first_token_seconds": "ttft",
        "e2e_request_latency_seconds": "e2e",
        "request_queue_time_seconds": "queue",
        "request_prefill_time_seconds": "prefill",
        "request_decode_time_seconds": "decode",
        "request_generation_tokens": "tokens",
    }
    shown = {f"request_success_total/{reason}": float(count)}
    for name, key in times.items():
        shown |= {f"{name}_count": float(count), f"{name}_sum": values[key]}
    between = values["tokens"] - count
    shown |= {
        "request_prompt_tokens_count": float(count),
        "request_prompt_tokens_sum": 8.0 * count,
        "prompt_tokens_total": 8.0 * count,
        "generation_tokens_total": values["tokens"],
        "inter_token_latency_seconds_count": between,
        "inter_token_latency_seconds_sum": values["decode"],
        "prefix_cache_queries_total": 8.0 * count,
    }
    return {name: value for name, value in shown.items() if value}


PLAIN = finished("length", ttft=3.0, e2e=4.0, queue=1.0, prefill=2.0, decode=1.0, tokens=3.0)


def plain(cluster: ScriptedCluster, rank: int = 0) -> None:
    """Runs a request with one second in the queue, two for the prompt, and half a second per
    token."""
    cluster.submit(PROMPT, 3)
    cluster.wait(1.0)
    cluster.step(rank, 2.0)
    cluster.step(rank, 0.5)
    cluster.step(rank, 0.5)


def test_metrics_of_a_plain_request():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        plain(cluster)

    assert serving(scenario) == PLAIN


def test_a_pure_echo_has_no_inter_token_latency():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.submit(PROMPT, 1)
        cluster.step(0, 2.0)

    assert serving(scenario) == finished(
        "length", ttft=2.0, e2e=2.0, queue=0.0, prefill=2.0, decode=0.0, tokens=1.0
    )


def test_a_cached_prompt_counts_as_hits():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        plain(cluster)
        plain(cluster)

    twice = finished("length", 2, ttft=6.0, e2e=8.0, queue=2.0, prefill=4.0, decode=2.0, tokens=6.0)
    # The last block contains the last prompt token, which is always computed.
    assert serving(scenario) == {**twice, "prefix_cache_hits_total": 4.0}


def test_without_prefix_caching_no_query_is_counted():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        plain(cluster)
        plain(cluster)

    twice = finished("length", 2, ttft=6.0, e2e=8.0, queue=2.0, prefill=4.0, decode=2.0, tokens=6.0)
    del twice["prefix_cache_queries_total"]
    assert serving(scenario, cache__prefix_caching=False) == twice


def test_a_request_that_must_compute_its_whole_prompt_counts_no_query():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        plain(cluster)
        cluster.submit(PROMPT, 1, prompt_logprobs=0)
        cluster.step(0, 1.0)

    shown = serving(scenario)
    assert shown["prompt_tokens_total"] == 16.0
    assert shown["prefix_cache_queries_total"] == 8.0
    assert "prefix_cache_hits_total" not in shown


def test_a_preempted_request_counts_its_query_once():
    def scenario(cluster: ScriptedCluster) -> None:
        # Seven blocks hold both prompts (two each) and one answer (three), but not both answers.
        core = cluster.join(0, num_blocks=7)
        other = [9, *PROMPT[1:]]
        cluster.submit(PROMPT, 9)
        cluster.submit(other, 9)
        while core.scheduler.has_requests:
            cluster.step(0, 1.0)
        assert core.scheduler.num_preemptions == 1

    shown = serving(scenario)
    assert shown["num_preemptions_total"] == 1.0
    assert shown["prefix_cache_queries_total"] == 16.0
    assert "prefix_cache_hits_total" not in shown, "its own blocks are no hit"
    assert shown["prompt_tokens_total"] == 16.0
    assert shown["generation_tokens_total"] == 18.0
    assert shown["inter_token_latency_seconds_count"] == 16.0
    assert shown["request_queue_time_seconds_count"] == 2.0
    assert "request_queue_time_seconds_sum" not in shown, "preemption is no queue"
    assert shown["request_prefill_time_seconds_sum"] == 2.0
    assert (
        shown["e2e_request_latency_seconds_sum"]
        == 2.0 + shown["request_decode_time_seconds_sum"]
        == 2.0 + shown["inter_token_latency_seconds_sum"]
    )
    assert shown["request_success_total/length"] == 2.0


@pytest.mark.parametrize("stays", [False, True])
def test_a_request_with_a_failover_counts_once(stays):
    """The first engine may have left with its counters, or continue later."""

    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.submit(PROMPT, 3)
        cluster.wait(1.0)
        cluster.step(0, 2.0)
        cluster.join(1)
        cluster.wait(0.25)
        if stays:
            cluster.mark(0, MemberState.REPAIRING)
        else:
            cluster.lose(0)
        cluster.wait(4.0)  # in the second engine's queue
        cluster.step(1, 1.0)
        cluster.step(1, 0.5)

    once = finished("length", ttft=3.0, e2e=8.75, queue=1.0, prefill=2.0, decode=5.75, tokens=3.0)
    if not stays:
        del once["prefix_cache_queries_total"]
    assert serving(scenario) == {**once, "resubmitted_requests_total": 1.0}


def test_a_request_without_output_of_its_first_engine_counts_as_queued_until_the_second():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.join(1)
        (state,) = cluster.submit(PROMPT, 3)
        first = state.ranks[0]
        cluster.wait(5.0)
        cluster.lose(first)
        cluster.wait(1.0)
        cluster.step(1 - first, 2.0)
        cluster.step(1 - first, 0.5)
        cluster.step(1 - first, 0.5)

    once = finished("length", ttft=8.0, e2e=9.0, queue=6.0, prefill=2.0, decode=1.0, tokens=3.0)
    assert serving(scenario) == {**once, "resubmitted_requests_total": 1.0}


def test_waiting_for_an_engine_counts_as_queue_time():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.lose(0)
        cluster.submit(PROMPT, 3)
        cluster.wait(5.0)
        cluster.join(1)
        cluster.wait(1.0)
        cluster.step(1, 2.0)
        cluster.step(1, 0.5)
        cluster.step(1, 0.5)

    assert serving(scenario) == finished(
        "length", ttft=8.0, e2e=9.0, queue=6.0, prefill=2.0, decode=1.0, tokens=3.0
    )


ENDED = {
    "request_prompt_tokens_count": 1.0,
    "request_prompt_tokens_sum": 8.0,
    "request_generation_tokens_count": 1.0,
    "e2e_request_latency_seconds_count": 1.0,
}
"""The metrics of a request that finished before its first token."""


def test_a_request_that_never_had_an_engine_was_queued_all_the_time():
    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.lose(0)
        (state,) = cluster.submit(PROMPT, 3)
        cluster.wait(7.0)
        with pytest.raises(NoEngine):
            await anext(MergedOutputs([state], SamplingParams(), RequestOutputKind.DELTA))

    assert serving(scenario, serve__no_engine_timeout_s=0.01) == {
        **ENDED,
        "e2e_request_latency_seconds_sum": 7.0,
        "request_queue_time_seconds_count": 1.0,
        "request_queue_time_seconds_sum": 7.0,
        "request_success_total/error": 1.0,
    }


def test_a_request_that_is_aborted_in_the_queue_has_no_prefill():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        states = cluster.submit(PROMPT, 3)
        cluster.wait(7.0)
        cluster.abort(states)

    assert serving(scenario) == {
        **ENDED,
        "e2e_request_latency_seconds_sum": 7.0,
        "request_success_total/abort": 1.0,
    }


def test_metrics_of_a_request_aborted_between_tokens():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        states = cluster.submit(PROMPT, 9)
        cluster.wait(1.0)
        cluster.step(0, 2.0)
        cluster.step(0, 0.5)
        cluster.wait(3.0)
        cluster.abort(states)

    assert serving(scenario) == finished(
        "abort", ttft=3.0, e2e=6.5, queue=1.0, prefill=2.0, decode=0.5, tokens=2.0
    )


def test_running_and_waiting_requests_are_counted():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0, num_blocks=10)
        for _ in range(3):
            cluster.submit(PROMPT, 3)
        cluster.step(0, 1.0)

    shown = serving(scenario, scheduler__max_rows=2, cache__prefix_caching=False)
    assert (shown["num_requests_running"], shown["num_requests_waiting"]) == (2.0, 1.0)
    assert shown["kv_cache_usage_ratio"] == 0.4


def test_three_answers_are_three_requests_and_compute_their_prompt_once():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.submit(PROMPT, 3, n=3)
        cluster.wait(1.0)
        cluster.step(0, 2.0)  # the prompt of one request
        for _ in range(3):
            cluster.step(0, 0.5)

    # The other two are scheduled one step later, find the cached block, and get their first tokens
    # in the first one's second step.
    assert serving(scenario) == {
        **finished(
            "length", 3, ttft=10.0, e2e=13.0, queue=7.0, prefill=3.0, decode=3.0, tokens=9.0
        ),
        "prefix_cache_hits_total": 8.0,
    }
