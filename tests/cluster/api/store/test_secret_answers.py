"""No answer, log line or command output contains a key of the cluster, of its users or of its
environment, for any request of any client and any failure meanwhile."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from starlette.routing import Route

from swell.cluster.api.server.api_keys import ApiKeys
from swell.cluster.api.sessions import session_client
from swell.cluster.cli.doctor.probes import host_facts
from swell.cluster.cli.main import main
from swell.cluster.control.cluster_status import Leftovers, ManagerStatus, describe
from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.backoff import MissingEngine
from swell.configs.runtime.log import KeyValueFormatter
from swell.configs.schema import ConfigError, load
from swell.coordinator.roster import Roster
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.wire import ClusterView
from tests.cluster.api.admin.admin_server import JSON, AdminServer, admin_server
from tests.cluster.api.bodies.test_request_forms import BODIES
from tests.support.untrusted.secret_texts import shows
from tests.test_layers import ROOT

pytestmark = pytest.mark.slow

USER, ADMIN = "Ux7Gq2Lm9ZtR4vWk8PnB", "Ad3Xc6Vb1NmQ8wEr5TyU"
ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer Ot5Lp8Hd2RsK7jFg4XzC",
    "RAY_AUTH_TOKEN": "Ra6Yt9Kn3WqZ5bVd1MsH",
    "SWELL_ADMIN_KEY": ADMIN,
}
SESSION = "sess_" + "0" * 32
TOKEN = "Rf4Jk7Lp2QwE9rTy6UiO"
"""Written into Ray's token file."""


class Failing:
    """Every remote call fails with an error whose arguments include the held value."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            raise RuntimeError(f"{name} failed", arguments, self._held) from ValueError(self._held)

        return type("Method", (), {"remote": staticmethod(remote)})


class Describing(Failing):
    """Describes a cluster in which everything has failed."""

    async def _describe(self) -> dict[str, Any]:
        error = repr(RuntimeError("it failed", self._held))
        return describe(
            ClusterView(Roster()),
            {0: EngineHandle(0, ended=error, waits_for_room=error)},
            {"pid": 1, "error": error},
            ManagerStatus(
                target=1,
                phase="failed",
                error=error,
                missing_engine=MissingEngine(0, error, 9, 0.0, exhausted=True, dying=False),
                leftovers=Leftovers(["a"], error, 1, 1.0),
                hang_reports=(),
                upgrade={"phase": "failed", "error": error},
                scaling={},
                cache_generation=0,
            ),
        )

    def __getattr__(self, name: str) -> Any:
        if name == "describe":
            return type("Method", (), {"remote": staticmethod(self._describe)})
        return super().__getattr__(name)


@pytest.fixture(scope="module")
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.getLogger("swell")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: io.StringIO) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "users").write_text(f"{USER} # the one\n")
    (folder / "admins").write_text(f"# operators\n{ADMIN}\n")
    settings = {
        "serve.api_keys_file": str(folder / "users"),
        "serve.admin_keys_file": str(folder / "admins"),
        "serve.otlp_endpoint": "http://127.0.0.1:9",
        "serve.no_engine_timeout_s": 0.01,
    }
    with admin_server(tmp_path_factory.mktemp("model"), **settings) as running:
        services, coordinator = running.cluster.ingress.services, running.cluster.coordinator
        contact = CoordinatorContact(coordinator.address, coordinator.keys, 1)
        services.manager = Describing(contact)
        failing, ingress = Failing(contact), running.cluster.ingress
        ingress._responses._store._store = failing
        ingress._sessions._client._store._store = failing
        ingress._sessions._client._is_enabled = True
        with patch.object(session_client, "_PATIENCE_S", 0.0):
            yield running


def secrets_of(server: AdminServer) -> list[bytes]:
    texts = [USER, ADMIN, TOKEN, *ENVIRONMENT.values()]
    texts.append(ENVIRONMENT["OTEL_EXPORTER_OTLP_HEADERS"].rpartition(" ")[2])
    known = [text.encode() for text in texts]
    digests = [hashlib.sha256(key).digest() for key in known]
    secret = server.cluster.coordinator.keys.secret
    parts = [one[: len(one) // 4 * 4] for one in known]
    return [*parts, *digests, secret]


def check(server: AdminServer, text: str, what: str) -> None:
    assert text
    for number, secret in enumerate(secrets_of(server)):
        assert not shows(text, secret), f"secret {number} is in {what}: {text[:500]}"


def credentials() -> list[dict[str, str]]:
    keys = [USER, ADMIN, USER[:-1], f"{ADMIN}x", USER.lower(), "\u00e9"]
    found: list[dict[str, str]] = [{}]
    for key in keys:
        found += [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]
        found.append({"authorization": f"Basic {key}"})
    return found


def test_no_answer_shows_a_secret(server: AdminServer, log: io.StringIO) -> None:
    seen: dict[str, set[int]] = {}
    for route in server.cluster.ingress.app.routes:
        assert isinstance(route, Route)
        id = SESSION if "/sessions/" in route.path else "resp_1"
        path = route.path.replace(":path}", "}").replace("{id}", id).replace("{model}", "x")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            for headers in credentials():
                for body in ({}, BODIES.get(path, {}), {"unknown": USER}):
                    sent = {name: value.encode("latin-1") for name, value in headers.items()}
                    answer = server.client.request(
                        method,
                        path,
                        headers={**sent, **{k: v.encode() for k, v in JSON.items()}},
                        content=json.dumps(body) if method == "POST" else None,
                    )
                    seen.setdefault(path, set()).add(answer.status_code)
                    text = f"{answer.headers} {answer.text}"
                    if "unknown" not in body:  # otherwise the text is the client's own
                        check(server, text, f"{method} {path}")
    assert seen["/admin/cluster"] == {200, 401} and seen["/admin/scale"] == {400, 401, 503}
    assert 200 in seen["/server_info"] and seen["/metrics"] == {200}
    for path in ("/v1/responses/resp_1", "/v1/sessions", f"/v1/sessions/{SESSION}"):
        assert 503 in seen[path], "the store has failed"
    check(server, log.getvalue() + "-", "the log")


def test_unredacted_errors_contain_the_held_values(server: AdminServer, log: io.StringIO) -> None:
    """The errors do contain the held values. Otherwise the other tests would prove nothing."""
    answer = server.client.get("/admin/cluster", headers={"x-api-key": ADMIN})
    assert "ChannelKeys(" in answer.json()["coordinator"]["error"]
    answer = server.client.get("/v1/responses/resp_1", headers={"x-api-key": USER})
    assert answer.status_code == 503 and "Read(" not in answer.text, "hosts are not for users"
    assert "Read(" in log.getvalue() and "ChannelKeys(" in log.getvalue()


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(words)
    captured = capsys.readouterr()
    return f"{code} {captured.out} {captured.err}"


def test_no_command_prints_a_secret(
    server: AdminServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    monkeypatch.setattr(host_facts, "_TORCH_PROBE", 'print(\'{"version": "2.13.0"}\')')
    url = f"http://127.0.0.1:{server.port}"
    for words in (("status",), ("status", "--json"), ("pause",), ("scale", "2")):
        for key in (ADMIN, USER, f"{ADMIN}x"):
            text = output(capsys, *words, "--url", url, "--api-key", key)
            check(server, text, f"swell {words}")
    assert "failed" in output(capsys, "status", "--url", url), "the key of the environment"
    serve = server.cluster.config.serve
    nano = str(ROOT / "configs" / "models" / "nano")
    settings = ("--set", f"serve.api_keys_file={serve.api_keys_file}", "--set", "serve.port=0")
    admins = ("--set", f"serve.admin_keys_file={serve.admin_keys_file}")
    for words in (("doctor", "--json"), ("doctor",)):
        text = output(capsys, *words, nano, *settings, *admins)
        assert text.startswith("0 ")
        check(server, text, f"swell {words}")


def test_an_error_about_a_key_file_shows_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for line in (
        f"{USER} {ADMIN}",
        f"{USER}#{ADMIN}",
        f"{USER}\u00e9",
        f"{USER}\x01",
        f"a\n{USER} b",
    ):
        path.write_text(line)
        with pytest.raises(ConfigError) as caught:
            ApiKeys(str(path), "serve.api_keys_file")
        text = str(caught.value)
        assert str(path) in text and f"line {1 + line.count(chr(10))}" in text
        assert USER not in text and ADMIN not in text


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://user:{USER}@collector:4318", f"https://{USER}@collector", f"//:{USER}@c"),
        *(f"http://collector/?token={USER}", f"http://collector/a#{USER}", f"http://a@b:{USER}@c"),
    ],
)
def test_a_password_in_a_collector_url_is_refused_and_not_shown(url: str) -> None:
    """Such a URL is refused because export errors report it."""
    with pytest.raises(ConfigError, match="otlp_endpoint") as caught:
        load({"model": {"path": "m"}}, {"serve.otlp_endpoint": url})
    assert USER not in str(caught.value)
