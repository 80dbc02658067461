"""Routes and headers besides the answers: after vLLM's test_basic.py, test_metrics.py and its tests
of middleware, SGLang's test_openai_server.py, and Ray Serve LLM's tests of its ingress."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conformance.in_process_server import (
    MODEL,
    InProcessServer,
    start_in_process_server,
)
from tests.conformance.peers.conftest import MAX_MODEL_LEN, Post
from tests.conformance.peers.differences import differs
from tests.conformance.peers.requests import (
    CHAT,
    COMPLETIONS,
    PLAIN,
    UPPER,
    model_body,
    ok,
    refused,
)
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

ORIGIN = "http://trusted.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type",
}


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/server_info"])
@pytest.mark.parametrize("end", ["", "/"])
def test_routes(in_process_server: InProcessServer, path: str, end: str) -> None:
    """vLLM test_basic.py::test_check_health, test_show_version, test_server_load; SGLang's
    /server_info; test_optional_middleware.py: a trailing slash causes no redirect"""
    assert in_process_server.client.get(path + end).status_code == 200


def test_version(in_process_server: InProcessServer) -> None:
    """vLLM test_basic.py::test_show_version"""
    assert isinstance(ok(in_process_server.client.get("/version"))["version"], str)


def test_load_at_rest(in_process_server: InProcessServer) -> None:
    """vLLM test_basic.py::test_server_load"""
    in_process_server.wait_idle()
    end = time.monotonic() + HANG_S
    # the load that the engine reported last
    while ok(in_process_server.client.get("/load"))["server_load"]:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_models(client: openai.OpenAI, in_process_server: InProcessServer) -> None:
    """vLLM test_models.py::test_check_models; SGLang test_openai_server.py::test_model_list; Ray
    test_model_discovery.py"""
    (model,) = client.models.list().data
    assert model.id == MODEL and model.object == "model"
    assert model.max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]
    assert ok(in_process_server.client.get("/v1/models/")) == ok(
        in_process_server.client.get("/v1/models")
    )


def test_one_model(client: openai.OpenAI) -> None:
    """SGLang test_openai_server.py::test_retrieve_model: `root` is the underlying model"""
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL and model.root == MODEL  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("non-existent-model")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_other_content_types(in_process_server: InProcessServer, kind: str | None) -> None:
    """vLLM test_basic.py::test_request_wrong_content_type"""
    content = json.dumps(model_body(messages=UPPER)).encode()
    headers = {"content-type": kind} if kind else {}
    answer = in_process_server.client.post(CHAT, content=content, headers=headers)
    assert answer.status_code in (400, 415), answer.text


def test_content_types_with_more(in_process_server: InProcessServer) -> None:
    """vLLM: a charset, and capital letters"""
    content = json.dumps(model_body(messages=UPPER)).encode()
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert ok(
            in_process_server.client.post(CHAT, content=content, headers={"content-type": kind})
        )


def test_cancelled_requests_leave_room(in_process_server: InProcessServer) -> None:
    """vLLM test_basic.py::test_request_cancellation: clients that disconnect early hold no slots"""
    body = model_body(messages=UPPER, max_tokens=1500, ignore_eos=True, stream=True)
    for _ in range(20):
        with in_process_server.client.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_bytes())
    in_process_server.answers()
    in_process_server.wait_idle()


def test_request_ids(in_process_server: InProcessServer) -> None:
    """vLLM test_x_request_id.py: the server returns the client's request id"""
    answer = in_process_server.client.post(
        CHAT, json=model_body(messages=UPPER), headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert in_process_server.client.get("/v1/models").headers["x-request-id"]


def test_no_cors_by_default(in_process_server: InProcessServer) -> None:
    """vLLM test_cors_middleware.py::test_default_origins_prevent_cross_origin_reads_and_..."""
    attacker = {"origin": "http://attacker.example"}
    answer = in_process_server.client.get("/v1/models", headers=attacker)
    assert "access-control-allow-origin" not in answer.headers
    preflight = in_process_server.client.options(CHAT, headers=attacker | PREFLIGHT)
    assert preflight.status_code >= 400
    assert "access-control-allow-origin" not in preflight.headers


@pytest.fixture(scope="module")
def open_to_pages() -> Iterator[InProcessServer]:
    with start_in_process_server(**{"serve.cors_origins": [ORIGIN]}) as in_process_server:
        yield in_process_server


def test_cors_for_one_origin(open_to_pages: InProcessServer) -> None:
    """vLLM test_cors_middleware.py::test_explicit_origin_allows_browser_requests"""
    client = open_to_pages.client
    for origin, allowed in ((ORIGIN, True), ("http://attacker.example", False)):
        answer = client.get("/v1/models", headers={"origin": origin})
        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
        preflight = client.options(CHAT, headers={"origin": origin} | PREFLIGHT)
        assert (preflight.status_code < 300) == allowed
        assert (preflight.headers.get("access-control-allow-origin") == origin) == allowed


def test_cors_of_a_stream(open_to_pages: InProcessServer) -> None:
    """A page can read events and errors, too"""
    client = open_to_pages.client
    for more in ({"stream": True}, {"temperature": -1}):
        body = model_body(messages=UPPER, **more)
        answer = client.post(CHAT, json=body, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_packed_bodies(in_process_server: InProcessServer, encoding: str, pack: Any) -> None:
    """SGLang and proxies in front of Ray Serve send compressed bodies"""
    content = pack(json.dumps(model_body(messages=UPPER, temperature=0)).encode())
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = ok(in_process_server.client.post(CHAT, content=content, headers=headers))
    assert answer["choices"][0]["message"]["content"] == "ABC"


def test_bodies_in_other_encodings(in_process_server: InProcessServer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "br"}
    refused(in_process_server.client.post(CHAT, content=b"x", headers=headers), 415)


def test_decompression_bombs_are_refused(in_process_server: InProcessServer) -> None:
    """SGLang test_request_body_validation.py, for a decompression bomb"""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    bomb = gzip.compress(b" " * 10**7)
    refused(in_process_server.client.post(CHAT, content=bomb, headers=headers), 413)


def test_a_byte_order_mark(in_process_server: InProcessServer) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(model_body(messages=UPPER)).encode()
    ok(
        in_process_server.client.post(
            CHAT, content=content, headers={"content-type": "application/json"}
        )
    )


def test_a_client_that_closes_its_half(in_process_server: InProcessServer) -> None:
    """Ray test_byte_relay.py: a relay that has sent everything closes its half of the connection
    and reads on"""
    content = json.dumps(model_body(messages=UPPER, temperature=0)).encode()
    host, port = in_process_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as one:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        one.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        one.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: one.recv(65536), b""))
    assert got.startswith(b"HTTP/1.1 200") and b'"ABC"' in got


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_trailing_slashes(in_process_server: InProcessServer, path: str) -> None:
    """Ray test_builder_ingress.py: routes work with and without a trailing slash"""
    assert ok(in_process_server.client.post(path + "/", json=model_body(**PLAIN[path])))


@pytest.mark.parametrize("path", ["/v1/chat/nothing", "/v1", "/nothing", "/v1/images/generations"])
def test_unknown_routes_are_404(in_process_server: InProcessServer, path: str) -> None:
    """vLLM test_validation_exception_handler.py: a 404 in OpenAI's form"""
    assert refused(in_process_server.client.post(path, json={}), 404)["message"]


def test_errors_have_openais_form(post: Post) -> None:
    """vLLM test_error_sanitization.py; Ray test_request_status.py"""
    error = refused(post(CHAT, messages=UPPER, temperature=-1))
    assert set(error) >= {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]


def test_errors_of_a_stream_come_before_it(post: Post) -> None:
    """Ray test_router.py: a refusal is not a stream"""
    answer = post(CHAT, messages=UPPER, temperature=-1, stream=True)
    assert answer.headers["content-type"] == "application/json"
    refused(answer)


def test_streams_are_event_streams(post: Post) -> None:
    """Ray test_anthropic_direct_streaming.py, vLLM test_stream_frame_template.py"""
    answer = post(CHAT, messages=UPPER, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


COUNTED = ["prompt_tokens_total", "generation_tokens_total"]


def metric(in_process_server: InProcessServer, name: str) -> float:
    lines = in_process_server.client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"swell_{name}"))


def test_metrics_count(in_process_server: InProcessServer, post: Post) -> None:
    """vLLM test_metrics.py::test_metrics_counts, under our names"""
    in_process_server.wait_idle()
    before = [metric(in_process_server, name) for name in COUNTED]
    usage = ok(post(COMPLETIONS, prompt="Hello there", max_tokens=7, ignore_eos=True))["usage"]
    after = [metric(in_process_server, name) for name in COUNTED]
    assert [new - old for new, old in zip(after, before, strict=True)] == [
        usage["prompt_tokens"],
        usage["completion_tokens"],
    ]


@pytest.mark.parametrize(
    "name",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
    ],
)
def test_metrics_exist(in_process_server: InProcessServer, post: Post, name: str) -> None:
    """vLLM test_metrics.py::test_metrics_exist, under our names"""
    ok(post(COMPLETIONS, prompt="Hello there", max_tokens=4))
    text = in_process_server.client.get("/metrics").text
    assert f"\nswell_{name}" in text


def test_many_at_once(post: Post) -> None:
    """SGLang test_openai_server.py: concurrent requests have the answers that each has by itself"""
    texts: dict[int, str] = {}

    def one(number: int) -> None:
        word = "abcdefghijklmnop"[number] * 3
        answer = ok(post(CHAT, messages=[{"role": "user", "content": f"upper: {word}"}]))
        texts[number] = answer["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 16
    alone: dict[int, str] = {}
    texts, alone = alone, texts
    one(3)
    assert texts[3] == alone[3]


@differs("sglang test_openai_embedding.py")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_embeddings(in_process_server: InProcessServer, path: str) -> None:
    """SGLang test_openai_embedding.py, test_serving_embedding.py; vLLM test_embedding.py"""
    ok(in_process_server.client.post(path, json=model_body(input="hi", query="a", documents=["b"])))


@differs("vllm test_lora_adapters.py")
def test_adapters(in_process_server: InProcessServer) -> None:
    """vLLM test_lora_adapters.py; SGLang test_lora_openai_compatible.py; Ray multiplex"""
    ok(
        in_process_server.client.post(
            "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"}
        )
    )


@differs("vllm test_batched_chat_completions.py")
def test_batched_conversations(in_process_server: InProcessServer) -> None:
    """vLLM test_batched_chat_completions.py"""
    ok(
        in_process_server.client.post(
            "/v1/chat/completions/batch", json=model_body(messages=[UPPER, UPPER])
        )
    )
