"""Access with API keys: after vLLM's test_authentication_middleware.py and Ray Serve LLM's
test_auth_middleware.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.conformance.peers.requests import CHAT, UPPER, model_body, ok

pytestmark = pytest.mark.slow

KEY = "valid-key"
ORIGIN = "http://dashboard.example"
GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/"),
    ("GET", "/v1/models/nano"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    settings = {"serve.api_keys_file": str(file), "serve.cors_origins": [ORIGIN]}
    with start_in_process_server(**settings) as in_process_server:
        yield in_process_server


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}]
)
def test_without_the_key(
    locked: InProcessServer, method: str, path: str, headers: dict[str, str]
) -> None:
    """vLLM test_auto_discovered_protected_routes_require_auth"""
    body = {"json": {}} if method == "POST" else {}
    assert locked.client.request(method, path, headers=headers, **body).status_code == 401


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"X-API-Key": KEY}]
)
def test_with_the_key(
    locked: InProcessServer, method: str, path: str, headers: dict[str, str]
) -> None:
    """vLLM test_auto_discovered_protected_routes_require_auth: the key is checked first"""
    body = {"json": {}} if method == "POST" else {}
    answer = locked.client.request(method, path, headers=headers, **body)
    assert answer.status_code in (200, 400, 404)


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/", "/ping/", "/ready"])
def test_probes_have_no_key(locked: InProcessServer, path: str) -> None:
    """vLLM test_unguarded_path_with_trailing_slash_needs_no_token"""
    assert locked.client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_options_reveal_nothing(locked: InProcessServer, path: str) -> None:
    """vLLM test_bare_options_on_a_guarded_mount_needs_a_token,
    test_options_without_origin_is_not_a_preflight"""
    for headers in ({}, {"access-control-request-method": "GET"}):
        answer = locked.client.options(path, headers=headers)
        assert answer.status_code >= 400 and "swell_" not in answer.text


def test_preflights_have_no_key(locked: InProcessServer) -> None:
    """vLLM test_cors_preflight_needs_no_token_and_returns_no_data"""
    headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
    headers |= {"access-control-request-headers": "authorization, content-type"}
    answer = locked.client.options(CHAT, headers=headers)
    assert answer.status_code < 300 and answer.content in (b"", b"OK")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()


def test_a_refusal_can_be_read_by_a_page(locked: InProcessServer) -> None:
    """Ray test_auth_middleware.py: 401 in OpenAI's format, readable by a page of an allowed
    origin"""
    answer = locked.client.post(CHAT, json=model_body(messages=UPPER), headers={"origin": ORIGIN})
    assert answer.status_code == 401 and answer.json()["error"]["message"]
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_an_answer_with_the_key(locked: InProcessServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert ok(locked.client.post(CHAT, json=model_body(messages=UPPER), headers=headers))


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_before_the_body_ends_the_connection(
    locked: InProcessServer, whole: bool
) -> None:
    """A 401 does not wait for the body, and closes the connection if the body is incomplete, so
    that a client with keep-alive does not reuse it"""
    host, port = locked.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    sent = f"{head}content-length: 2\r\n\r\n{'{}' if whole else ''}"
    with socket.create_connection((host, int(port)), 30) as one:
        one.sendall(sent.encode())
        answer = one.recv(65536).split(b"\r\n\r\n")[0].lower()
        assert answer.startswith(b"http/1.1 401")
        assert (b"connection: close" in answer) != whole
        if not whole:
            one.sendall(b"{}")
            rest = b"".join(iter(lambda: one.recv(65536), b""))
            assert b"HTTP/1.1" not in rest
