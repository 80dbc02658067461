"""Two ingresses and two engines of two workers each, with the first engine for prefill.

Answers are those of transformers, and each ingress has the metrics of all requests. If an engine
dies during a stream, the events of the request are available at any ingress, in the answer, and at
an OpenTelemetry collector.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from swell.worker.wire import HANDOVER_FOLDER
from tests.cluster.api.tracing.otlp_collector import Collector, needs_exporter, start_collector
from tests.e2e.cluster import NANO, Cluster
from tests.e2e.test_splits import assert_equal_to_transformers
from tests.faults.process import alive
from tests.support.deadlines import HANG_S

pytestmark = [pytest.mark.slow, needs_exporter]

NUM_WORKERS = 4
TOKENS = 400
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
SPLIT_TOKENS = 24
"""From this many uncached tokens on, the first engine computes a prompt; the second decodes."""
ASKS = 16
"""Number of requests. The kernel chooses the ingress of each connection, so with a probability of
1 in 32768 one of the two gets no request."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with start_collector() as running:
        yield running


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """The `cache.handover_folder`."""
    with tempfile.TemporaryDirectory(prefix="swell-handover-", dir="/dev/shm") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(collector: Collector, folder: str) -> Iterator[Cluster]:
    settings = (
        "model.dtype=float32",
        "parallel.data=2",
        "parallel.tensor=2",
        "serve.ingress_replicas=2",
        "cluster.stall_timeout_s=30",
        "parallel.prefill_engines=1",
        f"parallel.prefill_min_tokens={SPLIT_TOKENS}",
        f"cache.handover_folder={folder}",
        f"serve.otlp_endpoint={collector.endpoint}",
    )
    with Cluster(NANO, *settings) as running:
        yield running


def test_answers_equal_transformers(cluster, heldout, truth, folder):
    assert_equal_to_transformers(cluster, heldout, truth)
    assert not os.listdir(f"{folder}/{HANDOVER_FOLDER}"), "each file was read"


def test_the_second_engine_continues_a_prefill_of_the_first_one(cluster, folder):
    """Uses prompts that are not in the cache of the second engine."""
    for number in range(4):
        prompt = [3 + (number * 31 + index * 7) % 200 for index in range(100)]
        fields = {"prompt": prompt, "max_tokens": 8, "include_timings": True}
        answer = cluster.post("/v1/completions", fields)
        assert answer.headers["x-swell-engine"] == "0,1", answer.text
        events = answer.json()["timings"]["choices"][0]["events"]
        (moved,) = [event for event in events if event["event"] == "resubmitted"]
        assert moved["reason"] == "its prompt was computed, and another engine continues"
    assert not os.listdir(f"{folder}/{HANDOVER_FOLDER}")


def ended(cluster: Cluster) -> set[float]:
    """Returns the numbers of finished requests in several polls of /metrics. The kernel chooses the
    ingress of each poll."""
    pattern = r"^swell_request_success_total{.*} (\S+)$"
    texts = [cluster.get("/metrics").text for _ in range(12)]
    return {sum(map(float, re.findall(pattern, text, re.MULTILINE))) for text in texts}


def test_any_ingress_counts_all_requests(cluster):
    earlier, counts = set(), ended(cluster)
    while len(counts) > 1 or counts != earlier:  # until all finished requests are reported
        time.sleep(3)
        earlier, counts = counts, ended(cluster)
    (before,) = counts
    fields = {"model": "nano", "prompt": "count from 1 to 9", "max_tokens": 8}
    for _ in range(12):
        cluster.post("/v1/completions", fields)
    deadline = time.monotonic() + HANG_S
    while (count := ended(cluster)) != {before + 12}:
        assert time.monotonic() < deadline, f"{count}, and it were {before}"


def stream_while_its_engine_dies(cluster: Cluster) -> tuple[str, dict[str, Any]]:
    """Kills the engine of a stream; returns the id of the request and its timings."""
    engines = cluster.get("/admin/cluster").json()["engines"]
    pids = {str(engine["rank"]): engine["pid"] for engine in engines}
    payload = {
        "prompt": [1, 2, 3],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "include_timings": True,
    }
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=payload, headers=CALLER, timeout=HANG_S) as answer:
        assert answer.status_code == 200
        os.kill(pids[answer.headers["x-swell-engine"]], signal.SIGKILL)
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        return answer.headers["x-request-id"], json.loads(lines[-1][6:])["timings"]


def check_moved(events: list[dict[str, Any]]) -> None:
    names = [event["event"] for event in events]
    moved = names.index("resubmitted")
    assert names[:5] == ["received", "routed", "queued", "scheduled", "first_token"]
    assert names[-5:] == ["routed", "queued", "scheduled", "first_token", "finished"]
    times = [event["ms"] for event in events]
    assert times == sorted(times)
    before, after = events[moved], events[-1]
    assert (before["attempt"], after["attempt"]) == (1, 2)
    assert before["reason"] == "the engine was lost"
    assert {event["rank"] for event in events[1 : moved + 1]} == {before["rank"]}
    assert {event["rank"] for event in events[-5:]} == {after["rank"]}
    assert before["rank"] != after["rank"]


def found(cluster: Cluster, id: str) -> list[dict[str, Any]]:
    """Returns the entries of all ingresses for a request, once all of them have answered: on a busy
    machine, one may not respond for a while."""
    deadline = time.monotonic() + HANG_S
    while True:
        answer = cluster.get(f"/admin/requests/{id}")
        if answer.status_code == 200 and answer.json()["complete"]:
            requests: list[dict[str, Any]] = answer.json()["requests"]
            return requests
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)


def test_a_stream_survives_the_death_of_its_engine(cluster: Cluster, collector: Collector) -> None:
    id, timings = stream_while_its_engine_dies(cluster)
    check_moved(timings["choices"][0]["events"])
    asked = set()
    for _ in range(ASKS):
        (story,) = found(cluster, id)
        assert story["timings"] == timings
        asked.add(story["ingress"])
    assert len(asked) == 1, "it is always the one that served it"
    root, first, second = collector.take(3, TRACE)
    assert root["attributes"]["gen_ai.usage.output_tokens"] == TOKENS
    ranks = [span["attributes"]["swell.engine.rank"] for span in (first, second)]
    events = timings["choices"][0]["events"]
    assert ranks == [events[1]["rank"], events[-1]["rank"]]


def test_each_ingress_finds_requests_of_both(cluster: Cluster) -> None:
    """Sends requests until both ingresses have served one."""
    ingresses: set[int] = set()
    deadline = time.monotonic() + HANG_S
    while len(ingresses) < 2:
        assert time.monotonic() < deadline, ingresses
        answer = cluster.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
        ingresses.add(found(cluster, answer.json()["id"])[0]["ingress"])
    unknown = cluster.get("/admin/requests/unknown")
    assert unknown.status_code == 404, unknown.text


def test_any_ingress_cancels_a_stream_by_its_id(cluster: Cluster) -> None:
    """Each request chooses an ingress at random, so some cancels arrive at the other one. No answer
    can finish before: the workers are suspended."""
    workers = pids_of_workers(cluster)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as pool:
            assert [*pool.map(partial(cancel, cluster), range(ASKS))] == ["abort"] * ASKS
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):  # it counted as hanging
                os.kill(pid, signal.SIGCONT)


def pids_of_workers(cluster: Cluster) -> list[int]:
    """Waits until all workers are ready: an earlier test may have killed an engine."""
    deadline = time.monotonic() + HANG_S
    while True:
        engines = cluster.get("/admin/cluster").json()["engines"]
        workers = [worker for engine in engines for worker in engine["workers"]]
        pids = [worker["pid"] for worker in workers if worker["status"] == "ready"]
        if len(pids) == NUM_WORKERS and all(map(alive, pids)):
            return pids
        assert time.monotonic() < deadline, engines
        time.sleep(0.2)


def cancel(cluster: Cluster, number: int) -> str:
    """Cancels an answer that waits for its first token, and returns its finish reason."""
    id, url = f"cancelled-{number}", f"{cluster.url}/v1/completions"
    payload = {"prompt": [1, 2], "max_tokens": 400, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        sent = {"json": payload, "headers": {"x-request-id": id}, "timeout": HANG_S}
        answer = pool.submit(httpx.post, url, **sent)
        deadline = time.monotonic() + HANG_S
        while (found := cluster.post("/v1/cancel", {"request_id": id})).status_code != 200:
            assert time.monotonic() < deadline, found.text  # no ingress has read the request yet
        assert found.json() == {"results": [{"id": id, "status": "cancelled"}]}
        lines = [line[6:] for line in answer.result().text.splitlines() if "choices" in line]
    reason: str = json.loads(lines[-1])["choices"][0]["finish_reason"]
    return reason


def chunk_of(cluster: Cluster, session: str, number: int, ids: list[int]) -> dict[str, Any]:
    """Returns the answer to a chunk. If its ingress dies, the connection fails. The chunk is then
    sent again with the same number, so it is not appended twice."""
    payload = {
        "prompt": ids,
        "session_id": session,
        "session_chunk": number,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            answer = httpx.post(f"{cluster.url}/v1/completions", json=payload, timeout=HANG_S)
        except httpx.TransportError:
            assert time.monotonic() < deadline
            continue
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


def test_a_session_survives_all_processes_that_serve_it(cluster: Cluster) -> None:
    """Compares each answer with that of a request without a session, whose prompt consists of all
    chunks and answers before it."""
    created = cluster.post("/v1/sessions", {})
    assert created.status_code == 200, created.text
    session, before = created.json()["id"], list[int]()

    def kill(part: str, count: int) -> None:
        for pid in cluster.named(part)[:count]:
            os.kill(pid, signal.SIGKILL)

    def kill_engines(count: int) -> None:
        engines = cluster.get("/admin/cluster").json()["engines"]
        for pid in [engine["pid"] for engine in engines if engine["pid"]][:count]:
            os.kill(pid, signal.SIGKILL)

    faults: list[Callable[[], None]] = [
        lambda: None,
        lambda: kill("ServeReplica:swell:Store", 1),
        lambda: kill_engines(1),
        lambda: kill("ServeReplica:swell:Ingress", 1),
        lambda: kill_engines(2),
        lambda: None,
    ]
    for number, fault in enumerate(faults):
        chunk = [5 + number, 6, 7]
        fault()
        found = chunk_of(cluster, session, number, chunk)
        before += chunk
        assert found["prompt_token_ids"] == before
        before += found["token_ids"]
    cluster.wait_idle()
    whole, start = before, 0
    for number in range(len(faults)):  # again, without sessions and without faults
        end = start + 3
        plain = {"prompt": whole[:end], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = cluster.post("/v1/completions", plain | {"return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == whole[end : end + 40], number
        start = end + 40
    assert cluster.get(f"/v1/sessions/{session}").json()["tokens"] == len(whole)
    ended = httpx.delete(f"{cluster.url}/v1/sessions/{session}", timeout=HANG_S)
    assert ended.json()["deleted"] is True
