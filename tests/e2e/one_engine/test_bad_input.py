"""Invalid input gets a 4xx with OpenAI's error body, and the next request succeeds."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD = {"model": "nano", "messages": [{"role": "user", "content": "upper: abc"}], "max_tokens": 8}
PROMPT = {"model": "nano", "prompt": "hi", "max_tokens": 4}

# (path, body, status, param, words of the message)
FIELDS = [
    (CHAT, {**GOOD, "temperature": -1}, 400, "temperature", ["-1", "100"]),
    (CHAT, {**GOOD, "temperature": "hot"}, 400, "temperature", ["hot"]),
    (CHAT, {**GOOD, "top_p": -1}, 400, "top_p", ["top_p=-1"]),
    (CHAT, {**GOOD, "top_p": 1.5}, 400, "top_p", ["1.5"]),
    (CHAT, {**GOOD, "top_k": -7}, 400, "top_k", ["-7"]),
    (CHAT, {**GOOD, "min_p": 2}, 400, "min_p", ["2"]),
    (CHAT, {**GOOD, "max_tokens": 0}, 400, "max_tokens", ["0"]),
    (CHAT, {**GOOD, "max_tokens": -3}, 400, "max_tokens", ["-3"]),
    (CHAT, {**GOOD, "max_tokens": 10**30}, 400, None, []),
    (CHAT, {**GOOD, "min_tokens": 9}, 400, "min_tokens", ["9", "8"]),
    (CHAT, {**GOOD, "stop": ["a"] * 17}, 400, "stop", ["17", "16"]),
    (CHAT, {**GOOD, "stop": [""]}, 400, "stop[0]", []),
    (CHAT, {**GOOD, "stop_token_ids": [10**6]}, 400, "stop_token_ids[0]", ["1000000"]),
    (CHAT, {**GOOD, "n": 129}, 400, "n", ["129", "128"]),
    (CHAT, {**GOOD, "best": 1}, 400, "best", ["best"]),
    (CHAT, {**GOOD, "messages": []}, 400, "messages", []),
    (CHAT, {**GOOD, "messages": [{"role": 7, "content": "x"}]}, 400, "messages[0].role", []),
    (CHAT, {**GOOD, "data_parallel_rank": 9}, 400, "data_parallel_rank", ["9"]),
    (CHAT, {**GOOD, "stream_options": {"include_usage": True}}, 400, "stream_options", []),
    (CHAT, {**GOOD, "model": 7}, 400, "model", ["model"]),
    (CHAT, {**GOOD, "model": "gpt-9"}, 404, "model", ["gpt-9", "nano"]),
    (TEXT, {**PROMPT, "prompt": ""}, 400, "prompt", ["empty"]),
    (TEXT, {**PROMPT, "prompt": []}, 400, "prompt", []),
    (TEXT, {**PROMPT, "prompt": [5, 10**6]}, 400, "prompt[1]", ["1000000"]),
    (TEXT, {**PROMPT, "prompt": [5, -1]}, 400, "prompt[1]", ["-1"]),
    (TEXT, {**PROMPT, "prompt": "a" * 5000}, 400, "prompt", ["maximum context length"]),
    (TEXT, {**PROMPT, "prompt": [7] * 5000}, 400, "prompt", ["maximum context length"]),
    (TEXT, {**PROMPT, "max_tokens": 5000}, 400, "prompt", ["maximum context length"]),
    ("/admin/scale", {"engines": 0}, 400, None, ["engines=0"]),
    ("/admin/scale", {"engines": -2}, 400, None, ["-2"]),
    ("/admin/scale", {"engines": 10**6}, 400, None, ["cluster.max_engines"]),
    ("/admin/scale", {"engines": "two"}, 400, "engines", ["two"]),
    ("/admin/drain", {"rank": 77}, 400, None, ["77"]),
]
BODIES = [
    (b"{", 400),
    (b"", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'{"model": "nano", "prompt": "\\ud800"}', 400),
    (b'{"model": "nano", "prompt": "x", "temperature": NaN}', 400),
    (b'{"model": "nano", "prompt": "x", "temperature": 1e999}', 400),
    (b'{"model": "nano", "prompt": ' + b"[" * 100_000, 400),
    (b"\xff\xfe{}", 400),
    (b'{"model": "nano", "prompt": "' + b"a" * 50_000_000 + b'"}', 413),
]


def works(cluster) -> None:
    answer = cluster.post(CHAT, {**GOOD, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ABC"


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), FIELDS)
def test_a_wrong_field_is_named(cluster, path, body, status, param, words):
    answer = cluster.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    for word in words:
        assert word in error["message"]
    works(cluster)


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[str(b[:30]) for b, _ in BODIES])
def test_a_broken_body_is_refused(cluster, body, status):
    headers = {"content-type": "application/json"}
    try:
        answer = httpx.post(cluster.url + TEXT, content=body, headers=headers, timeout=HANG_S)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        assert status == 413, "a server may close while a body that is too long is being sent"
    else:
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    works(cluster)


def test_a_chunked_body_without_a_length_is_limited_too(cluster):
    def parts():
        for _ in range(40):
            yield b"a" * 1_000_000

    try:
        headers = {"content-type": "application/json"}
        answer = httpx.post(cluster.url + TEXT, content=parts(), headers=headers, timeout=HANG_S)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass
    else:
        assert answer.status_code == 413
    works(cluster)


def test_a_wrong_content_type_path_or_method_is_refused(cluster):
    body = json.dumps(PROMPT)
    wrong = httpx.post(
        cluster.url + TEXT, content=body, headers={"content-type": "text/plain"}, timeout=HANG_S
    )
    assert wrong.status_code == 415
    assert cluster.get("/v1/nothing").status_code == 404
    assert cluster.get(TEXT).status_code == 405
    works(cluster)
