"""The pages that may read answers. With `serve.cors_origins`, every answer has the headers,
including refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.admin import admin_routes
from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.api.server.cors import Cors, CorsRules
from swell.configs.schema import ConfigError, load
from tests.cluster.api.bodies.test_request_forms import BODIES, GETS, ID
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

PAGE = "https://app.example"
OTHER = "https://evil.example"
JSON = {"content-type": "application/json"}
ALLOWED = "access-control-allow-origin"
EXPOSED = "access-control-expose-headers"
ADMIN = sorted(
    {one.path for one in OPERATIONS if one.path.startswith("/admin") or "_lora_" in one.path}
)
ON = {"serve.cors_origins": [PAGE, "http://localhost:3000"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def preflight(path: str, origin: str, method: str = "POST", **headers: str) -> Any:
    response = {"origin": origin, "access-control-request-method": method, **headers}
    return ("OPTIONS", path, response, b"")


def call(path: str, origin: str, **headers: str) -> Any:
    """Returns a valid request as a page sends it."""
    if path not in BODIES:
        return ("GET", path, {"origin": origin, **headers}, b"")
    body = json.dumps(BODIES[path]).encode()
    return ("POST", path, {"origin": origin, **JSON, "x-request-id": ID, **headers}, body)


def answers(folder: Path, *requests: Any, **settings: Any) -> list[httpx.Response]:
    settings.setdefault("serve.stored_responses", 0)

    async def scenario() -> list[httpx.Response]:
        with_store = FakeCluster(folder, **settings)
        with_store.store = StoreOfTest().new_handle()
        async with with_store.serving() as cluster:
            await cluster.join(0)
            return [
                await cluster.client.request(method, path, headers=headers, content=body)
                for method, path, headers, body in requests
            ]

    return asyncio.run(scenario())


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: v for name, v in answer.headers.items() if name.startswith("access-control-")}


def varies(answer: httpx.Response) -> list[str]:
    """Returns the headers of a request that change its answer."""
    return answer.headers.get("vary", "").split(", ")


ROUTES = [*GETS, *(path for path in BODIES if path not in ADMIN)]


def test_no_cors_headers_by_default(folder: Path) -> None:
    response = [call(path, PAGE) for path in ROUTES]
    response += [preflight(path, PAGE) for path in [*ROUTES, *ADMIN]]
    got = answers(folder, *response)
    assert not any(cors_headers(one) or "Origin" in varies(one) for one in got)
    assert all(one.status_code == 405 for one in got[len(ROUTES) :])


@pytest.mark.parametrize("settings", [ON, {"serve.cors_origins": ["*"]}], ids=["listed", "all"])
def test_all_routes_except_admin_routes_may_be_called(folder: Path, settings: Any) -> None:
    origin = PAGE if settings is ON else "*"
    got = answers(folder, *(call(path, PAGE) for path in ROUTES), **settings)
    for one in got:
        assert one.status_code == 200, one.text
        assert one.headers[ALLOWED] == origin
        assert {"x-swell-engine", "x-swell-warning"} <= set(one.headers[EXPOSED].split(", "))
        assert "Origin" in varies(one)
    response = {"access-control-request-headers": "x-stainless-os, authorization"}
    for one in answers(folder, *(preflight(path, PAGE, **response) for path in ROUTES), **settings):
        assert one.status_code == 200
        assert one.headers[ALLOWED] == origin
        taken = set(one.headers["access-control-allow-headers"].split(", "))
        assert {"x-stainless-os", "authorization"} <= taken
        assert {"GET", "POST", "DELETE"} <= set(
            one.headers["access-control-allow-methods"].split(", ")
        )


@pytest.mark.parametrize("settings", [ON, {"serve.cors_origins": ["*"]}], ids=["listed", "all"])
def test_the_admin_api_has_no_cors_headers(
    folder: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for every spelling of the path and for any setting of `serve.allowed_origins`."""
    monkeypatch.setattr(
        admin_routes, "_ENGINE_CALL_TIMEOUT_S", 0.05
    )  # the engine here answers no calls
    paths = [*ADMIN, *(f"{path}/" for path in ADMIN), "/admin", "/%61dmin/cluster"]
    response = [preflight(path, PAGE) for path in paths]
    response += [call(path, PAGE) for path in ADMIN]
    got = answers(folder, *response, **settings, **{"serve.allowed_origins": [PAGE]})
    assert not any(cors_headers(one) for one in got)
    assert {one.status_code for one in got[: len(paths)]} == {404, 405}


def test_other_origins_are_not_allowed(folder: Path) -> None:
    got = answers(
        folder,
        preflight("/v1/chat/completions", OTHER),
        preflight("/v1/chat/completions", "null"),
        preflight("/v1/chat/completions", PAGE + ".evil.example"),
        call("/v1/chat/completions", OTHER),
        ("GET", "/v1/models", {}, b""),
        **ON,
    )
    assert [one.status_code for one in got] == [400, 400, 400, 200, 200]
    assert got[0].text == "Disallowed CORS origin"
    assert not any(ALLOWED in one.headers for one in got)
    assert all("Origin" in one.headers["vary"] for one in got)


def test_refusals_are_readable_too(folder: Path) -> None:
    """Checks 401, 404, 405, 413, 415, 400, and a 403 for an unknown server name."""
    keys = folder / "keys"
    keys.write_text("k\n")
    shown = {"authorization": "Bearer k"}
    chat = "/v1/chat/completions"
    page = {"origin": PAGE, **shown}
    got = answers(
        folder,
        call(chat, PAGE),
        call("/v1/nothing", PAGE, **shown),
        ("PUT", chat, page, b""),
        ("POST", chat, {**page, **JSON}, b"x" * 2000),
        ("POST", chat, {**page, "content-type": "text/plain"}, b"{}"),
        ("POST", chat, {**page, **JSON}, b"{}"),
        call(chat, PAGE, **shown, host="evil.example"),
        call("/v1/messages", PAGE),
        **ON,
        **{"serve.api_keys_file": str(keys), "serve.max_body_bytes": 1000},
    )
    assert [one.status_code for one in got] == [401, 404, 405, 413, 415, 400, 403, 401]
    assert {one.headers.get(ALLOWED) for one in got} == {PAGE}


def test_a_preflight_needs_no_key(folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text("k\n")
    settings = {**ON, "serve.api_keys_file": str(keys)}
    (got,) = answers(folder, preflight("/v1/chat/completions", PAGE), **settings)
    assert got.status_code == 200


def test_refusals_by_a_full_cluster_and_event_streams_have_cors_headers(folder: Path) -> None:
    """A 429 is sent before the body is read. The head of a stream is sent with its first token."""
    payload = {**BODIES["/v1/chat/completions"], "stream": True}
    settings = {**ON, "serve.max_waiting_requests": 1, "scheduler.max_rows": 1}

    async def scenario() -> list[httpx.Response]:
        async with FakeCluster(folder, **settings).serving() as cluster:
            engine = await cluster.join(0)
            post = {"headers": {"origin": PAGE}, "json": payload}
            streamed = await cluster.client.post("/v1/chat/completions", **post)
            engine.call(lambda: setattr(engine, "credit_steps", 0))
            held = [
                asyncio.create_task(cluster.client.post("/v1/chat/completions", **post))
                for _ in range(4)
            ]
            done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
            engine.allow()
            await asyncio.gather(*held)
            return [streamed, *(task.result() for task in done)]

    streamed, refused, *_ = asyncio.run(scenario())
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert refused.status_code == 429
    assert streamed.headers[ALLOWED] == refused.headers[ALLOWED] == PAGE
    assert "retry-after" in refused.headers[EXPOSED]


WIRES = {
    "a long URL": (b"GET /%b HTTP/1.1\r\n", 414),
    "many headers": (b"GET / HTTP/1.1\r\nOrigin: %b\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
    "a stopped head": (b"GET / HTTP/1.1\r\nOrigin: %b\r\na: b", 408),
    "a stopped body": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\nx",
        408,
    ),
}


async def raw_answer(port: int, data: bytes) -> tuple[int, dict[bytes, bytes]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    writer.close()
    fields = dict(line.split(b": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), fields


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("origins", [[PAGE, OTHER], ["*"], []], ids=["listed", "all", "off"])
def test_refusals_of_the_connection_are_readable_too(
    folder: Path, name: str, origins: list[str]
) -> None:
    data, status = WIRES[name]
    filled = data.replace(b"%b", b"x" * 10_000 if status == 414 else PAGE.encode())
    knows_origin = origins == ["*"] or (origins and status != 414)

    async def scenario() -> tuple[int, dict[bytes, bytes]]:
        settings = {
            "serve.cors_origins": origins,
            "serve.head_timeout_s": 0.2 if name == "a stopped head" else 60.0,
            "serve.transfer_timeout_s": 0.2 if name == "a stopped body" else 60.0,
        }
        async with FakeCluster(folder, **settings).serving() as cluster:
            return await raw_answer(cluster.edge.port, filled)

    got, fields = asyncio.run(scenario())
    assert got == status
    expected = None if not knows_origin else b"*" if origins == ["*"] else PAGE.encode()
    assert fields.get(ALLOWED.encode()) == expected


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/path", "null", "https://", "", "*.example"]
)
def test_an_invalid_origin_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.cors_origins"):
        load({"model": {"path": "."}}, {"serve.cors_origins": [wrong]})


def test_origins_are_compared_as_browsers_write_them(folder: Path) -> None:
    settings = {"serve.cors_origins": ["HTTPS://App.Example/", "http://[::1]:8080"]}
    pages = [PAGE, "http://[::1]:8080", "http://[::1]", "https://app.example:444"]
    got = answers(folder, *(call("/health", page) for page in pages), **settings)
    assert [one.headers.get(ALLOWED) for one in got] == [PAGE, pages[1], None, None]


@pytest.mark.parametrize("path", ["/admin/cluster", "/admin/cluster/"])
def test_the_admin_api_has_no_cors_headers_below_a_prefix_of_serves_proxy(path: str) -> None:
    """Under Ray Serve the path begins with the prefix, and routes are matched after it."""

    async def response() -> list[Any]:
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "root_path": "/llm", "path": "/llm" + path}
        rules = CorsRules(frozenset({PAGE}))
        scope["headers"] = [(b"origin", PAGE.encode())]
        await Cors(app, rules)(scope, None, send)  # type: ignore[arg-type]
        return sent

    (start,) = asyncio.run(response())
    assert start["headers"] == []
