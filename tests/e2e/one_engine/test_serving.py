"""One engine, tested over HTTP with OpenAI's client; the reference is transformers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

MODEL = "nano"


def client(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=cluster.url + "/v1", api_key="none", timeout=HANG_S, max_retries=0
    )


def chat(prompt: str, **extra: object) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **extra}


async def whole(api: openai.AsyncOpenAI, prompt: str, **extra: object) -> str:
    answer = await api.chat.completions.create(**chat(prompt, **extra))
    return answer.choices[0].message.content or ""


async def streamed(api: openai.AsyncOpenAI, prompt: str, **extra: object) -> str:
    stream = await api.chat.completions.create(**chat(prompt, stream=True, **extra))
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )


def test_64_concurrent_answers_equal_transformers_streamed_and_whole(cluster, heldout, truth):
    prompts = [record["messages"][-1]["content"] for record in heldout[:64]]

    async def answer_all() -> tuple[list[str], list[str]]:
        async with client(cluster) as api:
            wholes = await asyncio.gather(
                *(whole(api, p, temperature=0, max_tokens=100) for p in prompts)
            )
            streams = await asyncio.gather(
                *(streamed(api, p, temperature=0, max_tokens=100) for p in prompts)
            )
            return wholes, streams

    wholes, streams = asyncio.run(answer_all())
    expected = [truth(prompt, 100)[1] for prompt in prompts]
    assert wholes == expected
    assert streams == expected


def test_token_ids_equal_transformers(cluster, truth):
    prompt = "count from 3 to 12"
    ids, text = truth(prompt, 60)
    body = chat(prompt, temperature=0, max_tokens=60, return_token_ids=True)
    answer = cluster.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_accuracy_equals_the_model_card(cluster, heldout):
    card = (NANO / "README.md").read_text()
    expected = int(re.search(r"^exact_match_count: (\d+)", card, re.M).group(1))

    async def answer_all() -> list[str]:
        limit = asyncio.Semaphore(64)
        async with client(cluster) as api:

            async def complete(record: dict) -> str:
                async with limit:
                    answer = await api.chat.completions.create(
                        model=MODEL, messages=record["messages"], temperature=0, max_tokens=160
                    )
                    return answer.choices[0].message.content or ""

            return await asyncio.gather(*(complete(record) for record in heldout))

    answers = asyncio.run(answer_all())
    right = sum(a == record["answer"] for a, record in zip(answers, heldout, strict=True))
    assert len(heldout) == 500
    assert right == expected


def test_a_seeded_answer_is_the_same_in_any_batch(cluster):
    fields = {"temperature": 1.2, "top_p": 0.95, "seed": 7, "max_tokens": 40}

    async def answers() -> tuple[str, list[str]]:
        async with client(cluster) as api:
            alone = await whole(api, "alphabet from c", **fields)
            crowd = [
                whole(api, f"reverse: word{i}", temperature=1.0, max_tokens=30) for i in range(31)
            ]
            among = await asyncio.gather(whole(api, "alphabet from c", **fields), *crowd)
            return alone, among

    alone, among = asyncio.run(answers())
    assert among[0] == alone


def test_completions_accept_every_form_of_prompt(cluster):
    forms = ["upper: abc", ["upper: abc", "reverse: abc"], [117, 112], [[117, 112], [97]]]
    for form, choices in zip(forms, (1, 2, 1, 2), strict=True):
        body = {"model": MODEL, "prompt": form, "max_tokens": 5, "temperature": 0}
        answer = cluster.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert [c["index"] for c in answer.json()["choices"]] == list(range(choices))
        assert answer.headers["x-swell-engine"] == "0"
        texts = [""] * choices
        stream = httpx.post(
            cluster.url + "/v1/completions", json={**body, "stream": True}, timeout=HANG_S
        )
        for event in stream.text.strip().split("\n\n"):
            if event != "data: [DONE]":
                for choice in json.loads(event[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        assert texts == [c["text"] for c in answer.json()["choices"]]


def test_stop_strings_end_the_text_and_free_the_engine(cluster):
    body = chat("count from 3 to 30", temperature=0, max_tokens=150, stop=["6, 7"])
    answer = cluster.post("/v1/chat/completions", body).json()["choices"][0]
    assert answer["message"]["content"] == "3, 4, 5, "
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "6, 7")


def test_a_warm_prefix_changes_nothing_and_is_counted(cluster):
    long = "upper: " + "abc def " * 8
    body = chat(long, temperature=0, max_tokens=20)
    cold = cluster.post("/v1/chat/completions", body).json()
    warm = cluster.post("/v1/chat/completions", body).json()
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_no_prefix_is_found_after_a_reset(cluster):
    """The ingress hears of the reset a moment after its answer."""
    body = chat("upper: " + "fed cba " * 8, temperature=0, max_tokens=20)

    def ask() -> tuple[int, list[dict]]:
        answer = cluster.post("/v1/chat/completions", body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]

    _, expected = ask()
    before = cluster.get("/admin/cluster").json()["cache_generation"]
    assert cluster.post("/admin/reset_prefix_cache", {}).status_code == 202
    assert cluster.get("/admin/cluster").json()["cache_generation"] == before + 1
    deadline = time.monotonic() + HANG_S
    while (found := ask())[0]:
        assert found[1] == expected and time.monotonic() < deadline, found
    assert found == (0, expected)
    cached, choices = ask()
    assert cached > 0 and choices == expected


def generated_tokens(cluster: Cluster) -> float:
    text = cluster.get("/metrics").text
    return float(re.search(r"^swell_generation_tokens_total (\S+)", text, re.M).group(1))


CHOICES = 64
LONG = {"temperature": 1, "max_tokens": 1900, "ignore_eos": True, "n": CHOICES}
"""Fields of a request that takes many times longer than the second after which a disconnected
client is detected (`half_close.PROBE_S`), also on much faster machines."""


def test_a_client_that_leaves_frees_its_blocks(cluster):
    body = chat("x", stream=True, **LONG)
    before, url = generated_tokens(cluster), cluster.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=HANG_S) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
    assert_cut_short(cluster, before)


def test_a_client_that_leaves_without_streaming_frees_its_blocks(cluster):
    body = chat("x", **LONG)
    before = generated_tokens(cluster)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as http:
            asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while (await http.get("/admin/idle")).json()["engines"][0]["idle"]:
                assert not asked.done()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave())
    assert_cut_short(cluster, before)


def assert_cut_short(cluster: Cluster, before: float) -> None:
    cluster.wait_idle()
    after = generated_tokens(cluster)
    assert after - before < CHOICES * LONG["max_tokens"], "it went on without a reader"


def test_health_ready_models_and_metrics_answer(cluster):
    assert cluster.get("/health").status_code == 200
    assert cluster.get("/ready").json()["engines"] == [0]
    assert cluster.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert cluster.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    text = cluster.get("/metrics").text
    for name in (
        "swell_num_requests_running",
        "swell_num_requests_waiting",
        "swell_kv_cache_usage_ratio",
        "swell_prompt_tokens_total",
        "swell_generation_tokens_total",
        "swell_time_to_first_token_seconds_bucket",
        "swell_inter_token_latency_seconds_bucket",
        "swell_e2e_request_latency_seconds_bucket",
        "swell_request_queue_time_seconds_bucket",
        'swell_request_success_total{finished_reason="stop"}',
        "swell_num_preemptions_total",
        "swell_prefix_cache_queries_total",
        "swell_prefix_cache_hits_total",
        "swell_epoch",
    ):
        assert name in text, name
    cluster_view = cluster.get("/admin/cluster").json()
    assert {"epoch", "wave", "state", "target", "engines", "coordinator", "rescale"} <= set(
        cluster_view
    )
    (engine,) = cluster_view["engines"]
    phases = [each["phase"] for each in engine["start"]]
    assert phases[-3:] == [
        "loading weights",
        "measuring memory",
        "allocating the KV cache",
    ]
    assert all(each["seconds"] >= 0 for each in engine["start"])


def test_detokenize_inverts_tokenize(cluster):
    text = "héllo ☺ 你好"
    ids = cluster.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert cluster.post("/detokenize", {"tokens": ids}).json()["prompt"] == text


@pytest.mark.parametrize("level", [1, 2])
def test_requests_to_a_sleeping_engine_are_answered_after_it_wakes_up(cluster, level):
    body = chat("count from 3 to 9", temperature=0, max_tokens=60)
    expected = cluster.post("/v1/chat/completions", body).json()["choices"]

    def until(sleep_level: int, status: int) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            (engine,) = cluster.get("/admin/cluster").json()["engines"]
            ready = httpx.get(cluster.url + "/ready", timeout=HANG_S).status_code
            if (engine["sleep_level"], ready) == (sleep_level, status):
                return
            assert time.monotonic() < deadline, (engine, ready)
            time.sleep(0.1)

    assert cluster.post("/admin/sleep", {"level": level}).status_code == 202
    until(level, 503)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(cluster.post, "/v1/chat/completions", body)
        time.sleep(1.0)
        assert not waiting.done()
        assert cluster.post("/admin/wake", {}).status_code == 202
        assert waiting.result(HANG_S).json()["choices"] == expected
    until(0, 200)
    cluster.wait_idle()
