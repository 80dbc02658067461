"""`swell doctor` with a real two-node Ray cluster in which one node hangs, and without any Ray."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from swell.cluster.cli.child_process import descendants
from swell.cluster.cli.doctor.doctor_command import UNREACHABLE, Report, check_start
from swell.cluster.cli.doctor.probes.ray_hosts import _living, _lost, _reason
from swell.configs.schema import ConfigError, load
from tests.cluster.control.ray.real_ray import RealRay
from tests.faults.process import title
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

NANO = str(ROOT / "configs" / "models" / "nano")
HEALTHY_S: list[float] = []
"""How long `swell doctor` took while both nodes answered. Empty if only one test is run."""


def late_s() -> int:
    """Returns a time limit that a node keeps if it answers: `swell doctor` waits this long for the
    node that hangs."""
    return max(30, math.ceil(2 * max(HEALTHY_S, default=0.0)))


@pytest.fixture(scope="module")
def world() -> Iterator[RealRay]:
    """A Ray that does not declare a stopped node dead, however long `swell doctor` waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_health_check_failure_threshold", "1000")
        made = RealRay()
    try:
        made.add_host()
        yield made
    finally:
        made.close()


def run(address: str, *words: str) -> tuple[int, Report]:
    command = [sys.executable, "-m", "swell.cluster", "doctor", "--json", "--address", address]
    command.append(f"--timeout={HANG_S:g}")
    done = subprocess.run([*command, *words], capture_output=True, check=False)
    assert done.stdout, done.stderr.decode()[-2000:]
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.exit_code == done.returncode
    return done.returncode, report


def levels(report: Report, level: str) -> set[str]:
    return {finding.check for finding in report.findings if finding.level == level}


def other_raylet(world: RealRay) -> int:
    assert world._other_host is not None
    (found,) = [pid for pid in descendants(world._other_host.pid) if "raylet/raylet" in title(pid)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "token", "found"),
    [
        (
            None,
            None,
            "sends none, because RAY_AUTH_MODE is not set: run export RAY_AUTH_MODE=token",
        ),
        ("disabled", None, "because RAY_AUTH_MODE is disabled"),
        ("token", "0123456789abcdef" * 4, "copy ~/.ray/auth_token"),
        ("token", "", "copy ~/.ray/auth_token"),
    ],
)
def test_a_missing_token_is_reported_with_the_way_out(
    world: RealRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str | None,
    token: str | None,
    found: str,
) -> None:
    """`ray start` demands a token if the account has one, as after `swell serve`. Commands that
    connect send it only with RAY_AUTH_MODE=token."""
    address = ray.get_runtime_context().gcs_address
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.delenv("RAY_AUTH_MODE")
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token is not None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        (tmp_path / ".ray").mkdir()
        if token:
            (tmp_path / ".ray" / "auth_token").write_text(token)
    code, report = run(address, NANO)
    assert code == UNREACHABLE
    (cluster,) = [one for one in report.findings if one.check == "cluster"]
    assert address in cluster.value and found in cluster.value


@pytest.mark.slow
def test_two_nodes_answer_and_connect_to_each_other(world: RealRay) -> None:
    address = ray.get_runtime_context().gcs_address
    before = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    begun = time.monotonic()
    code, report = run(address, NANO, "--set", "serve.host=0.0.0.0", "--set", "serve.port=0")
    HEALTHY_S.append(time.monotonic() - begun)
    assert code == 0 and levels(report, "error") == set(), report.findings
    assert len(report.hosts) == 2
    assert "free-resources" in levels(report, "ok")
    assert len(report.links) == 6 and not [link for link in report.links if link.error]
    assert {link.part for link in report.links} == {"coordinator", "engines", "http"}
    assert "token-authentication" in levels(report, "ok")  # Ray enables it for its own clusters
    assert all(facts.ray and facts.ray.session_folder for facts in report.hosts.values())
    assert {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)} == before
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


@pytest.mark.slow
def test_a_start_on_this_ray_is_checked_on_both_nodes(world: RealRay) -> None:
    check_start(load(NANO, {"serve.port": 0}))
    config = load(NANO, {"serve.port": 0, "serve.chat_template": "/nowhere/a.jinja"})
    with pytest.raises(ConfigError, match=r"on [^;]+, [^;]+: serve\.chat_template: /nowhere/a"):
        check_start(config)
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


@pytest.mark.slow
def test_a_node_that_hangs_is_named_and_the_other_is_checked(world: RealRay) -> None:
    address = ray.get_runtime_context().gcs_address
    raylet, limit_s = other_raylet(world), late_s()
    os.kill(raylet, signal.SIGSTOP)
    try:
        code, report = run(address, NANO, "--timeout", str(limit_s))
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert code == 1
    assert "hosts" in levels(report, "error")
    (found,) = [finding for finding in report.findings if finding.check == "hosts"]
    assert found.value == f"no answer after {limit_s} s"
    (silent,) = found.hosts
    assert len(report.hosts) == 1 and silent not in report.hosts
    assert {"python", "files", "room"} <= levels(report, "ok")


@pytest.mark.slow
def test_an_address_without_ray_is_reported() -> None:
    """The port is closed, or its listener never answers. Ray retries for a while, so both cases run
    in parallel."""
    with (
        socket.socket() as closed,
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(2) as pool,
    ):
        closed.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{at.getsockname()[1]}" for at in (closed, silent)]
        for code, report in pool.map(lambda address: run(address, NANO), addresses):
            assert code == 2 and levels(report, "error") == {"cluster"}


def node(host: str, node_id: str, *, alive: bool = True, **fields: object) -> dict[str, object]:
    return {"NodeManagerAddress": host, "NodeID": node_id, "Alive": alive, **fields}


def test_nodes_with_one_address_are_distinguished() -> None:
    nodes = [node("10.0.0.2", "cc" * 28), node("10.0.0.1", "bb" * 28), node("10.0.0.1", "aa" * 28)]
    found = {name: row["NodeID"][:2] for name, row in _living(nodes).items()}
    assert found == {"10.0.0.1": "aa", "10.0.0.1/bbbbbb": "bb", "10.0.0.2": "cc"}


def test_only_hosts_that_were_not_removed_count_as_lost() -> None:
    dead = {"alive": False, "DeathReason": "UNEXPECTED_TERMINATION"}
    nodes = [
        node("10.0.0.1", "a"),
        node("10.0.0.1", "b", **dead, DeathReasonMessage="it was started again"),
        node("10.0.0.2", "c", **dead, DeathReasonMessage="health check failed"),
        node("10.0.0.3", "d", alive=False, DeathReason="EXPECTED_TERMINATION"),
    ]
    assert _lost(nodes) == {"10.0.0.2": "health check failed"}


def test_reasons_are_one_line() -> None:
    raised = RayTaskError("facts", "a traceback\nof many lines", ImportError("no swell\nthere"))
    assert _reason(raised, 5.0) == "ImportError: no swell"
    assert _reason(TimeoutError(), 5.0) == "no answer after 5 s"
    assert "\n" not in _reason(ActorDiedError(), 5.0)
