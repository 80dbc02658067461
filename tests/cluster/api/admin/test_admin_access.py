"""The access rules of the admin API against requests that ordinary clients would not send: from a
web page, from an untrusted peer through a filtering proxy, or through a proxy that parses them
differently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from swell.cluster.api.server import api_keys
from swell.cluster.api.server.access import host_name
from swell.cluster.api.server.api_keys import ApiKeys
from tests.cluster.api.admin.admin_server import (
    POSTS,
    ROUTES,
    AdminRoute,
    AdminServer,
    admin_server,
)

pytestmark = pytest.mark.slow

USER, ADMIN = "alpha", "root"
HOST, JSON = b"Host: localhost", b"Content-Type: application/json"
KEY, WRONG = b"Authorization: Bearer root", b"Authorization: Bearer alpha"
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"
EVIL = b"evil.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "users").write_text(USER)
    (folder / "admins").write_text(ADMIN)
    settings = {
        "serve.api_keys_file": str(folder / "users"),
        "serve.admin_keys_file": str(folder / "admins"),
    }
    with admin_server(tmp_path_factory.mktemp("model"), **settings) as running:
        yield running


def head(
    *headers: bytes,
    target: bytes = b"/admin/pause",
    method: bytes = b"POST",
    version: bytes = b"1.1",
    host: tuple[bytes, ...] = (HOST,),
    key: tuple[bytes, ...] = (KEY,),
    kind: tuple[bytes, ...] = (JSON,),
) -> bytes:
    line = method + b" " + target + b" HTTP/" + version
    return b"\r\n".join([line, *host, *key, *kind, *headers, b"Connection: close", b"", b""])


def request(*headers: bytes, body: bytes = b"{}", **parts: Any) -> bytes:
    return head(*headers, b"Content-Length: %d" % len(body), **parts) + body


def chunked(*headers: bytes, body: bytes = CHUNKS, coding: bytes = CHUNKED, **parts: Any) -> bytes:
    return head(*headers, coding, **parts) + body


def statuses(server: AdminServer, data: bytes) -> list[int]:
    """Returns the statuses of all final responses on one connection."""
    found = re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", server.send(data))
    return [int(status) for status in found]


ACCEPTED = {
    "as clients write it": request(),
    "in chunks": chunked(),
    "chunks with another case": chunked(coding=b"transfer-encoding: CHUNKED"),
    "HTTP/1.0 without a host": request(version=b"1.0", host=()),
    "an empty host": request(host=(b"Host:",)),
    "a dot behind the host": request(host=(b"Host: LOCALHOST.:8000",)),
    "an address": request(host=(b"Host: [::1]:8000",)),
    "an absolute target": request(target=b"http://LOCALHOST/admin/pause"),
    "a slash at the end": request(target=b"/admin/pause/"),
    "the other header": request(key=(b"X-API-Key: root",)),
    "both headers": request(key=(KEY, b"x-api-key: root")),
    "the scheme in another case": request(key=(b"AUTHORIZATION:  bEaReR   root  ",)),
    "an origin of this machine": request(b"Origin: http://127.0.0.1:3000"),
    "an offer of another protocol": request(b"Upgrade: h2c", b"HTTP2-Settings: x"),
    "a header with a name like another": request(b"Content_Length: 9", b"X-Forwarded-Host: evil"),
}

HOSTS = (
    *(EVIL, b"evil.example:8000", b"evil.example@localhost", b"localhost@evil.example"),
    *(b"evil.example:localhost", b"localhost:evil.example", b"localhost, evil.example"),
    *(b"localhost evil.example", b"localhost..", b".localhost", b"localhost.evil.example"),
    *(b"2130706433", b"0x7f000001", b"127.1", b"127.0.0.1.evil.example", b"0177.0.0.1"),
    *(b"[evil.example]", b"[localhost", b"[::1]evil.example", b"[::1].evil.example:80"),
    *(b"[::1%evil.example]", b"::1%evil.example", b"::1.evil.example", b"[]", b"[::1]]"),
    *("localh\u00f6st".encode(), "\u216bcalhost".encode(), b"localhost/", b"localhost\\evil"),
)
ORIGINS = (
    *(b"http://evil.example", b"null", b"", b"http://localhost@evil.example", b"localhost", b"*"),
    *(b"http://localhost.evil.example", b"http://localhost http://evil.example", b"http://[::1"),
    *(b"http://evil.example,http://localhost", b"http://evil.example\\@localhost", b"file://"),
    *(b"http://evil.example#@localhost", b"http://localhost/evil", b"http://localhost?evil"),
    *(b"app://localhost", b"chrome-extension://localhost", b"http://", b"http://:80"),
    *(b"http://[::1]evil.example", b"http://2130706433", b"//localhost", b"http://0.0.0.0"),
    *(b"http://[::1%evil]", b"http://evil.example:80@localhost"),
)
FORBIDDEN = {
    **{f"host {name!r}": request(host=(b"Host: " + name,)) for name in HOSTS},
    **{f"origin {name!r}": request(b"Origin: " + name) for name in ORIGINS},
    "two origins": request(b"Origin: http://localhost", b"Origin: http://evil.example"),
    "an origin of another port of its host": request(
        b"Origin: http://10.0.0.1:9000", host=(b"Host: 10.0.0.1:8000",)
    ),
}
UNAUTHORIZED = {
    "no key": request(key=()),
    "a user's key": request(key=(WRONG,)),
    "another scheme": request(key=(b"Authorization: Basic root",)),
    "a key alone": request(key=(b"Authorization: root",)),
    "a list of keys": request(key=(b"Authorization: Bearer root, Bearer alpha",)),
    "a prefix": request(key=(b"Authorization: Bearer roo",)),
    "more": request(key=(b"Authorization: Bearer rootx",)),
    "another case": request(key=(b"Authorization: Bearer ROOT",)),
    "a comment": request(key=(b"Authorization: Bearer root # x",)),
    "a tab": request(key=(b"Authorization: Bearer\troot",)),
    "a name like another": request(key=(b"x_api_key: root",)),
    "a key in the query": request(target=b"/admin/pause?api_key=root", key=()),
    "a cookie": request(key=(b"Cookie: authorization=Bearer root",)),
    "a key in a trailer": chunked(
        key=(), body=b"2\r\n{}\r\n0\r\nAuthorization: Bearer root\r\nx-api-key: root\r\n\r\n"
    ),
}
BAD_HEADS = {
    # Name -> the request and its expected status.
    "two equal hosts": (request(host=(HOST, HOST)), 400),
    "two hosts": (request(host=(HOST, b"Host: evil.example")), 400),
    "two hosts, the other way round": (request(host=(b"Host: evil.example", HOST)), 400),
    "no host": (request(host=()), 400),
    "two keys": (request(key=(KEY, WRONG)), 400),
    "two keys, the other way round": (request(key=(WRONG, KEY)), 400),
    "two equal keys": (request(key=(KEY, KEY)), 400),
    "two keys of the other header": (request(key=(b"x-api-key: root", b"x-api-key: a")), 400),
    "two content types": (request(kind=(JSON, b"Content-Type: text/plain")), 415),
    "a target on another host": (request(target=b"http://evil.example/admin/pause"), 400),
    "a target with a user": (request(target=b"http://localhost@evil.example/admin/pause"), 400),
    "a host other than the target's": (
        request(target=b"http://localhost/admin/pause", host=(b"Host: evil.example",)),
        400,
    ),
    "a target without a path": (request(target=b"http://localhost"), 400),
    "a target of another scheme": (request(target=b"ftp://localhost/admin/pause"), 400),
    "a target that is no path": (request(target=b"admin/pause"), 400),
    "a target with backslashes": (request(target=b"\\admin\\pause"), 400),
    "an encoded slash at the start": (request(target=b"%2fadmin/pause"), 400),
    "a fragment": (request(target=b"/admin/pause#/health"), 400),
    "a tunnel": (request(target=b"localhost:80", method=b"CONNECT"), 400),
    "HTTP/2.0": (request(version=b"2.0"), 505),
    "HTTP/0.9": (b"GET /admin/cluster\r\n\r\n", 505),
    "HTTP/1.2": (request(version=b"1.2"), 400),
    "a method in lower case": (request(method=b"post"), 400),
    "a method of its own": (request(method=b"SCALE"), 400),
}
LENGTHS = (b"+2", b"-2", b"0x2", b"2, 2", b"2 2", b"", b"2;", b"99999999999999999999999", b"\xb2")
CODINGS = (
    *(b"identity", b"chunked, identity", b"identity, chunked", b"chunked, chunked", b"xchunked"),
    *(b"gzip, chunked", b"\x0bchunked", b"chunked;x", b'"chunked"', b"chunked\x00"),
)
SMUGGLED = {
    "length and coding": request(CHUNKED, body=CHUNKS),
    "coding and length": chunked(b"Content-Length: 2"),
    "two lengths": request(b"Content-Length: 3"),
    "two equal lengths": request(b"Content-Length: 2"),
    **{f"length {value!r}": head(b"Content-Length: " + value) + b"{}" for value in LENGTHS},
    **{f"coding {one!r}": chunked(coding=b"Transfer-Encoding: " + one) for one in CODINGS},
    "two codings": chunked(CHUNKED),
    "a coding of HTTP/1.0": chunked(version=b"1.0"),
    "a space behind a name": chunked(coding=b"Transfer-Encoding : chunked"),
    "a folded coding": chunked(coding=b"Transfer-Encoding:\r\n chunked"),
    "a folded key": request(key=(b"Authorization:\r\n Bearer root",)),
    "a space before a name": request(key=(b" Authorization: Bearer root",)),
    "a carriage return alone": request(b"X: a\rAuthorization: Bearer root"),
    "line feeds alone": request().replace(b"\r\n", b"\n"),
    "a NUL": request(b"X: a\0b"),
    "no colon": request(b"X"),
    "an empty name": request(b": x"),
    "a chunk size of C": chunked(body=b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a negative chunk": chunked(body=b"-2\r\n{}\r\n0\r\n\r\n"),
    "a chunk of 2**80": chunked(body=b"f" * 20 + b"\r\n{}\r\n0\r\n\r\n"),
    "line feeds of chunks": chunked(body=b"2\n{}\n0\n\n"),
    "a line feed in an extension": chunked(body=b"2;\nxx\r\n{}\r\n0\r\n\r\n"),
    "a chunk that goes on": chunked(body=b"1\r\n{}\r\n0\r\n\r\n"),
    "a chunk without its end": chunked(body=b"2\r\n{}0\r\n\r\n"),
}
OTHER_PATHS = (
    *(b"//admin/pause", b"/admin//pause", b"/admin/pause//", b"/admin/./pause", b"/./admin/pause"),
    *(b"/v1/../admin/pause", b"/v1/%2e%2e/admin/pause", b"/%61dmin/pause", b"/admin%2fpause"),
    *(b"/admin/%70ause", b"/admin/paus%65", b"/%2561dmin/pause", b"/ADMIN/pause", b"/admin/Pause"),
    *(b"/admin/pause;x=1", b"/admin/pause%00", b"/admin/pause%20", b"/admin/pause%", b"/admin"),
    *(b"/%c1%a1dmin/pause", b"/admin\\pause", b"/localhost/admin/pause", b"/admin%5cpause"),
    *(b"/admin/pause/.", b"/admin/pause/..", b"/admin/pause/x", b"/admin/pause%2f"),
    *(b"//localhost/admin/pause", b"/admin%2fpause/", b"/admin%2f%2fpause"),
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_valid_form_of_a_request_is_accepted(server: AdminServer, name: str) -> None:
    """Valid variants are accepted. Otherwise the invalid ones might be refused for another
    reason."""
    assert statuses(server, ACCEPTED[name]) == [202]
    assert server.changes() == ["pause"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_other_hosts_and_pages_are_refused(server: AdminServer, name: str) -> None:
    assert statuses(server, FORBIDDEN[name]) == [403]
    assert server.changes() == []


@pytest.mark.parametrize("name", UNAUTHORIZED)
def test_only_the_whole_key_in_its_header_is_accepted(server: AdminServer, name: str) -> None:
    assert statuses(server, UNAUTHORIZED[name]) == [401]
    assert server.changes() == []


@pytest.mark.parametrize("name", BAD_HEADS)
def test_ambiguous_request_heads_are_refused(server: AdminServer, name: str) -> None:
    data, status = BAD_HEADS[name]
    assert statuses(server, data) == [status]
    assert server.changes() == []


@pytest.mark.parametrize("name", SMUGGLED)
def test_bodies_of_ambiguous_length_are_refused(server: AdminServer, name: str) -> None:
    """The bytes after such a body are not parsed as another request."""
    answers = statuses(server, SMUGGLED[name] + request(target=b"/admin/resume"))
    assert len(answers) <= 1 and set(answers) <= {400, 415, 501}
    assert server.changes() == []


@pytest.mark.parametrize("target", OTHER_PATHS, ids=repr)
def test_another_spelling_of_an_admin_path_is_not_found(server: AdminServer, target: bytes) -> None:
    """A proxy that blocks `/admin` may compare the raw path, so only the exact spelling reaches the
    admin API."""
    assert statuses(server, request(target=target)) in ([404], [400])
    assert server.changes() == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_checks_path_host_origin_key_and_method(
    server: AdminServer, route: AdminRoute
) -> None:
    method, path = route.method.encode(), route.path.replace("{id}", "a%2Fb").encode()
    body = route.valid().encode() if route.method == "POST" else b""
    parts: dict[str, Any] = {"method": method, "target": path, "body": body}
    encoded = b"/%61dmin/" + path.removeprefix(b"/admin/")
    for name, data, status in (
        ("path", request(**{**parts, "target": encoded}), 404),
        ("host", request(host=(b"Host: evil.example",), **parts), 403),
        ("origin", request(b"Origin: http://evil.example", **parts), 403),
        ("key", request(key=(), **parts), 401),
        ("a user's key", request(key=(WRONG,), **parts), 401),
    ):
        assert statuses(server, data) == [status], name
    for other in (b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"):
        answer = server.send(request(**{**parts, "method": other}))
        assert answer.startswith(b"HTTP/1.1 405 ") and b"\r\nallow: " in answer
        assert b"access-control" not in answer
    assert server.changes() == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_head_is_get_without_a_body(server: AdminServer, route: AdminRoute) -> None:
    path = route.path.replace("{id}", "x").encode()
    for key, statuses_of_get in (((KEY,), (200, 404)), ((), (401,))):
        answer = server.send(request(method=b"HEAD", target=path, key=key, body=b""))
        top, _, body = answer.partition(b"\r\n\r\n")
        expected = statuses_of_get if route.method == "GET" else (405,)
        assert int(top.split()[1]) in expected and body == b""
    assert server.changes() == []


def test_a_method_in_a_header_is_ignored(server: AdminServer) -> None:
    for name in (b"X-HTTP-Method-Override", b"X-Method-Override", b"X-HTTP-Method"):
        data = request(name + b": POST", method=b"GET", body=b"")
        assert statuses(server, data) == [405]
    assert server.changes() == []


def test_bytes_after_a_refused_request_are_not_parsed(server: AdminServer) -> None:
    """If a body is not read, e.g. that of a request without a key, its bytes are not parsed as a
    request."""
    inner = request(target=b"/admin/resume")
    for data in (
        head(b"Content-Length: %d" % len(inner), key=()).replace(b"Connection: close\r\n", b""),
        head(b"Content-Length: 999999", key=()).replace(b"Connection: close\r\n", b""),
    ):
        assert statuses(server, data + inner) == [401]
    data = request(method=b"GET", target=b"/health", body=inner)
    assert statuses(server, data) == [200]
    assert server.changes() == []


def test_trailers_of_a_body_do_not_count_as_headers(server: AdminServer) -> None:
    for name in (b"Host: evil.example", b"Origin: http://evil.example", b"Authorization: Bearer x"):
        body = b"2\r\n{}\r\n0\r\n" + name + b"\r\n\r\n"
        assert statuses(server, chunked(body=body)) == [202]
        assert server.changes() == ["pause"]


@pytest.mark.parametrize("route", POSTS[:1], ids=lambda route: route.path)
def test_an_answer_to_an_untrusted_peer_reveals_nothing_about_the_cluster(
    server: AdminServer, route: AdminRoute
) -> None:
    answers = {
        server.send(request(key=(b"Authorization: Bearer " + key,))).partition(b"\r\n\r\n")[2]
        for key in (b"a", b"roo", b"rootx", b"alpha", b"\xff" * 200)
    }
    assert len(answers) == 1


def test_all_keys_are_compared_wherever_the_match_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Every key is compared, and only digests are compared, so the response time reveals nothing
    about the keys."""
    path = tmp_path / "keys"
    path.write_text("a\nb\nc\n")
    keys, compared = ApiKeys(str(path), "serve.api_keys_file"), []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for key in (b"a", b"c"):
        compared.clear()
        keys.check(Request({"type": "http", "headers": [(b"x-api-key", key)]}))
        assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("host", [name.decode("latin-1") for name in HOSTS])
def test_foreign_host_names_do_not_read_as_localhost(host: str) -> None:
    assert host_name(host) != "localhost"
