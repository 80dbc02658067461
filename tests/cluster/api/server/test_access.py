"""Checks of the origins, host names and keys that the admin API and the other routes accept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.server.access import host_name
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}
EVIL = "http://evil.example"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def responses(
    folder: Path, *requests: tuple[str, str, dict[str, str]], **settings: Any
) -> list[Any]:
    """Returns status, code and message of each answer, then the calls that the manager received."""

    async def scenario() -> list[Any]:
        async with FakeCluster(folder, **settings).serving() as cluster:
            answers: list[Any] = []
            for method, path, headers in requests:
                content = b"{}" if method == "POST" else None
                answer = await cluster.client.request(
                    method, path, headers=headers, content=content
                )
                error = (answer.json() or {}).get("error") or {}
                answers.append((answer.status_code, error.get("code"), error.get("message", "")))
            return [*answers, cluster.manager.calls]

    return asyncio.run(scenario())


def test_pages_of_other_sites_reach_no_admin_route(folder: Path) -> None:
    *answers, reached = responses(
        folder,
        ("POST", "/admin/pause", {"origin": EVIL, "content-type": "text/plain"}),
        ("POST", "/admin/pause", {"origin": EVIL, **JSON}),
        ("POST", "/admin/pause", {"origin": "null", **JSON}),
        ("POST", "/admin/pause", {"content-type": "text/plain"}),
        ("POST", "/admin/pause", {}),
        ("POST", "/admin/pause", {**JSON, "host": "evil.example"}),
        ("POST", "/admin/pause", {**JSON, "host": "evil.example:8000", "origin": EVIL}),
        ("GET", "/admin/cluster", {"origin": EVIL}),
        ("GET", "/admin/cluster", {"host": "evil.example"}),
    )
    assert [status for status, _, _ in answers] == [403, 403, 403, 415, 415, 403, 403, 403, 403]
    assert "serve.allowed_origins" in answers[0][2] and "serve.allowed_hosts" in answers[5][2]
    assert reached == []


def test_the_server_itself_and_listed_origins_are_allowed(folder: Path) -> None:
    settings = {
        "serve.allowed_origins": ["https://ops.example"],
        "serve.allowed_hosts": ["ops.example"],
    }
    *answers, reached = responses(
        folder,
        ("POST", "/admin/pause", JSON),
        ("POST", "/admin/pause", {**JSON, "origin": "http://localhost:3000"}),
        ("POST", "/admin/pause", {**JSON, "origin": "https://ops.example"}),
        ("POST", "/admin/pause", {**JSON, "host": "ops.example:8000"}),
        ("POST", "/admin/pause", {**JSON, "host": "localhost", "origin": "http://[::1]:8000"}),
        ("POST", "/admin/pause", {**JSON, "host": "10.1.2.3:8000"}),
        ("POST", "/admin/pause", {**JSON, "host": "10.1.2.3", "origin": "http://10.1.2.3"}),
        **settings,
    )
    assert [status for status, _, _ in answers] == [202] * 7, answers
    assert reached == ["pause"] * 7


def test_a_loopback_server_answers_only_under_its_own_names(folder: Path) -> None:
    """DNS rebinding: an attacker's host name may resolve to the server's address, which makes page
    and server the same origin. The server refuses such a name."""
    evil = {"host": "evil.example:8000"}
    *answers, _ = responses(
        folder, ("GET", "/v1/models", evil), ("POST", "/v1/chat/completions", {**evil, **JSON})
    )
    assert [answer_[:2] for answer_ in answers] == [(403, "host_not_allowed")] * 2
    *answers, _ = responses(folder, ("GET", "/v1/models", {}), ("GET", "/health", evil))
    assert [status for status, _, _ in answers] == [200, 200]
    *answers, _ = responses(folder, ("GET", "/v1/models", {"host": ""}))
    assert answers[0][0] == 200, "HTTP allows it, and no browser sends it"
    *answers, _ = responses(folder, ("GET", "/v1/models", evil), **{"serve.host": "0.0.0.0"})
    assert answers[0][0] == 200, "a server that the network reaches does not know all of its names"
    *answers, _ = responses(folder, ("GET", "/v1/models", evil), **{"serve.allowed_hosts": ["*"]})
    assert answers[0][0] == 200


def test_only_json_is_read(folder: Path) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "", "application/json5")
    *answers, _ = responses(
        folder, *(("POST", "/v1/completions", {"content-type": kind}) for kind in kinds)
    )
    assert [status for status, _, _ in answers] == [415] * len(kinds)


def test_a_user_key_is_refused_by_admin_routes(folder: Path, tmp_path: Path) -> None:
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("alpha\n")
    admins.write_text("root\n")
    alpha, root = {"authorization": "Bearer alpha"}, {"authorization": "Bearer root"}

    def statuses(**settings: Any) -> list[int]:
        *answers, _ = responses(
            folder,
            *(("POST", "/admin/pause", {**JSON, **key}) for key in ({}, alpha, root)),
            *(("GET", "/admin/cluster", key) for key in ({}, alpha, root)),
            **settings,
        )
        return [status for status, _, _ in answers]

    only_users = {"serve.api_keys_file": str(users)}
    assert statuses(**only_users) == [403] * 6
    *answers, _ = responses(folder, ("GET", "/admin/cluster", alpha), **only_users)
    assert answers[0][1] == "no_admin_keys" and "serve.admin_keys_file" in answers[0][2]
    both = {**only_users, "serve.admin_keys_file": str(admins)}
    assert statuses(**both) == [401, 401, 202, 401, 401, 200]
    assert statuses(**{"serve.admin_keys_file": str(admins)}) == [401, 401, 202, 401, 401, 200]
    assert statuses() == [202] * 3 + [200] * 3, "without keys everything is open"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("A.Example", "a.example"),
        ("a.example:80", "a.example"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("localhost.:80", "localhost"),
    ],
)
def test_the_host_name_is_read_from_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name
