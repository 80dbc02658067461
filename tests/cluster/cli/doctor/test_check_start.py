"""`swell serve --address` checks every host before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swell.cluster.cli.doctor.doctor_command import START_CHECKS, check_start
from swell.cluster.cli.doctor.facts import StartFacts, StartSurvey
from swell.cluster.cli.doctor.probes import ray_hosts
from swell.cluster.cli.doctor.probes.host_facts import collect_start_facts
from swell.cluster.cli.start.start_reasons import StartupError
from swell.cluster.control.ray.http_port import claim_port, with_port
from swell.cluster.port_claim import PortClaims
from swell.configs.schema import Config, ConfigError, load

NODE = "127.0.0.11"
HEALTHY = StartFacts(addresses=("lo 10.0.0.1",), address="10.0.0.1", http_error=None, unreadable={})
LACKS_FILE = StartFacts(
    addresses=("lo 10.0.0.1",),
    address="10.0.0.1",
    http_error=None,
    unreadable={"serve.chat_template": "/a.jinja"},
)
LACKS_ADDRESS = StartFacts(addresses=(), address=None, http_error=None, unreadable={})


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """Yields a socket that listens on a port of the node's address."""
    with socket.socket() as listener:
        listener.bind((NODE, 0))
        listener.listen()
        yield listener


def problems(config: Config, node: str) -> dict[str, str]:
    """Returns the values of the failed checks for a cluster whose only host is this one."""
    survey = StartSurvey(hosts={node: collect_start_facts(config, node)}, config=config)
    found = [finding for check in START_CHECKS for finding in check(survey)]
    return {finding.check: finding.value for finding in found if finding.level == "error"}


def with_hosts(monkeypatch: pytest.MonkeyPatch, **hosts: StartFacts) -> Config:
    """Lets the hosts of the Ray cluster answer with these facts."""
    config = load("owner/name", {"cluster.interface": "10.0.0.0/24", "serve.port": 0})
    survey = StartSurvey(hosts=hosts, config=config)
    monkeypatch.setattr(ray_hosts, "ask_start_facts", lambda _config: survey)
    return config


def test_each_problem_is_named_once_with_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_start(with_hosts(monkeypatch, a=HEALTHY, b=HEALTHY))
    config = with_hosts(monkeypatch, a=LACKS_FILE, b=LACKS_FILE, c=HEALTHY, d=LACKS_ADDRESS)
    with pytest.raises(ConfigError) as caught:
        check_start(config)
    assert str(caught.value) == (
        "on d: it has no address; expected: an address at cluster.interface='10.0.0.0/24'; "
        "correct cluster.interface; if the names of the interfaces differ, set a network such as "
        "10.1.0.0/16; on a, b: serve.chat_template: /a.jinja cannot be read; expected: each at "
        "the same path on every host; copy or mount them there, at the same path and readable for "
        "Ray's user"
    )


def test_a_ray_that_does_not_answer_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(_config: Config) -> StartSurvey:
        raise ray_hosts.ClusterSilent("10.0.0.1:6379: Ray's GCS: no answer after 20 s")

    monkeypatch.setattr(ray_hosts, "ask_start_facts", silent)
    with pytest.raises(StartupError, match=r"no answer after 20 s; start Ray"):
        check_start(load("owner/name"))


def test_a_file_that_a_host_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load(str(tmp_path), {"serve.chat_template": "/nowhere/a.jinja", "serve.port": 0})
    lacks = "serve.chat_template: /nowhere/a.jinja cannot be read"
    assert problems(config, NODE) == {"files": lacks}
    (tmp_path / "config.json").unlink()
    also = f"model.path: {tmp_path}/config.json cannot be read"
    assert problems(config, NODE) == {"files": f"{lacks}, {also}"}


@pytest.mark.parametrize("host", [NODE, "0.0.0.0"])
def test_a_port_of_another_server_is_reported(taken: socket.socket, host: str) -> None:
    port = taken.getsockname()[1]
    config = load("owner/name", {"serve.host": host, "serve.port": port})
    assert problems(config, NODE) == {
        "http-port": f"serve.port={port} on {host} is in use; stop what listens there or choose "
        "another port (--port P, or serve.port)"
    }
    taken.close()
    assert problems(config, NODE) == {}


def test_a_port_that_another_application_has_claimed_is_reported(taken: socket.socket) -> None:
    """Another start has claimed the port, but its ingresses do not listen yet."""
    port = taken.getsockname()[1]
    config = load("owner/name", {"serve.host": NODE, "serve.port": port})
    taken.close()
    claim = PortClaims().claim(NODE, port, "another start", 1)
    try:
        (found,) = problems(config, NODE).values()
    finally:
        claim.release(ends=True)
    assert "in use by another application (another start" in found


def test_an_ingress_may_listen_at_the_interface(taken: socket.socket) -> None:
    """If no interface is configured, the ingress listens on the address that Ray uses for the
    host."""
    port = taken.getsockname()[1]
    config = load("owner/name", {"serve.host": "interface", "serve.port": port})
    assert problems(config, NODE)["http-port"].startswith(f"serve.port={port} on {NODE} is in use")
    assert problems(config, "127.0.0.12") == {}


def test_an_interface_that_a_host_lacks_is_reported() -> None:
    config = load("owner/name", {"cluster.interface": "10.99.99.0/24", "serve.port": 0})
    (check,) = problems(config, NODE)
    assert check == "interface"


def test_a_range_without_a_free_port_is_reported() -> None:
    """With `serve.port=0`, an ingress claims a port in the second eighth of the range."""
    config = load("owner/name", {"cluster.ports": "21700-21715", "serve.host": NODE})
    config = with_port(config, 0)
    assert claim_port(config).serve.port in range(21_702, 21_704)
    with ExitStack() as stack:
        for port in range(21_702, 21_704):
            listener = stack.enter_context(socket.socket())
            listener.bind((NODE, port))
            listener.listen()
        (problem,) = problems(config, NODE).values()
    assert problem.startswith(f"serve.port=0: none of the ports 21702-21703 is free on {NODE}")
