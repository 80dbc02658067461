"""The routes of the page: who gets it, with which headers, and what a browser may keep."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from swell.cluster.api.endpoints import StripTrailingSlash, no_such_route
from swell.cluster.api.request_context import RequestContextMiddleware
from swell.cluster.api.web.page_routes import FOLDER, MAX_BYTES, PageRoutes, read_static_files
from tests.support.deadlines import HANG_S

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NAMES = sorted(read_static_files())
MODULES = [name for name in NAMES if name.endswith(".js")]


class Client:
    """A client of the page, which a proxy mounts under `root_path`."""

    def __init__(self, root_path: str = "") -> None:
        app = Starlette(
            routes=PageRoutes().routes(),
            exception_handlers={404: no_such_route, 405: no_such_route},
            middleware=[Middleware(StripTrailingSlash), Middleware(RequestContextMiddleware, 5.0)],
        )
        app.router.redirect_slashes = False
        self._transport = httpx.ASGITransport(app, root_path=root_path)

    def request(self, method: str, path: str, headers: Any = None) -> httpx.Response:
        async def run() -> httpx.Response:
            client = httpx.AsyncClient(
                transport=self._transport, base_url="http://server", timeout=HANG_S
            )
            async with client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(run())

    def get(self, path: str, headers: Any = None) -> httpx.Response:
        return self.request("GET", path, headers)


@pytest.fixture(scope="module")
def client() -> Client:
    return Client()


def test_all_files_are_small() -> None:
    sizes = {str(path): path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < MAX_BYTES, sizes


def test_a_browser_gets_the_page_and_a_program_the_address_of_the_document(
    client: Client,
) -> None:
    page = client.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<!doctype html>" in page.text
    for accept in ("*/*", "application/json", "text/html;q=0", "text/htmlx"):
        answer = client.get("/", headers={"accept": accept})
        assert answer.status_code == 200
        assert answer.json()["openapi"] == "/openapi.json"
        assert "accept" in answer.headers["vary"]


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/ui/{name}" for name in NAMES)])
def test_every_file_is_sent_with_a_strict_policy(client: Client, path: str) -> None:
    answer = client.get(path, headers=BROWSER)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in _policy(answer).split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].startswith("text/")
    head = client.request("HEAD", path, BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == answer.headers["content-length"]


def _policy(answer: httpx.Response) -> str:
    return str(answer.headers["content-security-policy"])


def test_a_browser_that_has_a_file_gets_no_content(client: Client) -> None:
    first = client.get("/ui/app.js")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", {first.headers["etag"]}', "*"):
        again = client.get("/ui/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    changed = client.get("/ui/app.js", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200


def test_a_file_is_compressed_for_who_accepts_it(client: Client) -> None:
    plain = client.get("/ui/style.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    refused = client.get("/ui/style.css", headers={"accept-encoding": "gzip;q=0"})
    assert "content-encoding" not in refused.headers
    sent = client.get("/ui/style.css", headers={"accept-encoding": "br, gzip"})
    assert sent.headers["content-encoding"] == "gzip"
    assert int(sent.headers["content-length"]) < len(plain.content)
    assert sent.content == plain.content
    assert "accept-encoding" in plain.headers["vary"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/",
        "/ui/none.js",
        "/ui/../page_routes.py",
        "/ui/%2e%2e/page_routes.py",
        "/ui/..%2fpage_routes.py",
        "/ui//etc/passwd",
        "/ui/lib",
        "/ui/lib/../app.js",
        "/ui/app.js%00",
    ],
)
def test_only_files_of_the_page_are_sent(client: Client, path: str) -> None:
    answer = client.get(path)
    if answer.status_code == 200:  # the client itself removes dots
        assert answer.request.url.path == "/ui/app.js"
        return
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_files_cannot_be_written(client: Client) -> None:
    for path in ("/", "/docs", "/ui/app.js"):
        answer = client.request("POST", path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


def test_the_page_is_at_the_depth_that_its_relative_addresses_expect() -> None:
    client = Client("/llm")
    bare = client.get("/llm", headers=BROWSER)
    assert (bare.status_code, bare.headers["location"]) == (307, "llm/")
    assert "<!doctype html>" in client.get("/llm/", headers=BROWSER).text
    deep = client.get("/llm/docs/", headers=BROWSER)
    assert (deep.status_code, deep.headers["location"]) == (307, "../docs")
    assert client.get("/llm/docs", headers=BROWSER).status_code == 200
    assert client.get("/llm/ui/app.js").status_code == 200
    assert client.get("/llm").json()["openapi"] == "/openapi.json"


def test_pages_load_only_their_own_files() -> None:
    for name in ("index.html", "docs.html"):
        text = (FOLDER / name).read_text()
        for address in re.findall(r'(?:src|href)="([^"]*)"', text):
            if not address.startswith(("data:", "#", "./#")):
                assert address in {f"ui/{one}" for one in NAMES} | {"docs", "openapi.json"}, address
        assert not re.search(r"<script(?![^>]*src=)|style=|\son\w+=", text), "the policy forbids it"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_files_of_the_page(name: str) -> None:
    text = (FOLDER / name).read_text()
    for address in re.findall(r'(?:from|import)\s*\(?"([^"]+)"', text):
        target = (FOLDER / name).parent / address
        assert target.resolve().relative_to(FOLDER.resolve()).as_posix() in NAMES, address


@pytest.mark.parametrize("name", MODULES)
def test_no_module_reads_content_as_markup_or_keeps_it(name: str) -> None:
    """Keys and conversations stay in the memory of the page, and answers are text."""
    text = (FOLDER / name).read_text()
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|\beval\b"
    banned += r"|new Function|localStorage|sessionStorage|indexedDB|document\.cookie|EventSource"
    assert not re.findall(banned, text)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_one_subject(name: str) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= 300
    assert [line for line in lines if len(line) > 100] == []


def test_files_are_read_only_once(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert client.get("/ui/app.js").status_code == 200
