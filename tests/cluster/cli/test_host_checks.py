"""The requirements of a host are checked on every host before anything is started."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from swell.cluster.cli.doctor import host_checks
from swell.cluster.cli.doctor.host_checks import problems, refusal
from swell.cluster.control.ray.http_port import claim_port, with_port
from swell.configs.schema import ConfigError, load

NODE = "127.0.0.11"


@pytest.fixture
def taken() -> socket.socket:
    """Yields a socket that listens on a port of the node's address."""
    with socket.socket() as listener:
        listener.bind((NODE, 0))
        listener.listen()
        yield listener


def test_each_problem_is_named_once_with_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"10.0.0.2": ["no file", "no port"], "10.0.0.1": ["no file"], "10.0.0.3": []}
    assert refusal(answers) == "on 10.0.0.1, 10.0.0.2: no file; on 10.0.0.2: no port"
    monkeypatch.setattr(host_checks, "_check_all_hosts", lambda config: answers)
    with pytest.raises(ConfigError, match="no file"):
        host_checks.check_hosts(load("owner/name"))
    monkeypatch.setattr(host_checks, "_check_all_hosts", lambda config: {"10.0.0.1": []})
    host_checks.check_hosts(load("owner/name"))


def test_a_file_that_a_host_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load(str(tmp_path), {"serve.chat_template": "/nowhere/a.jinja", "serve.port": 0})
    (problem,) = problems(config, NODE)
    assert problem.startswith("serve.chat_template: /nowhere/a.jinja cannot be read")
    (tmp_path / "config.json").unlink()
    assert [text.partition(":")[0] for text in problems(config, NODE)] == [
        "serve.chat_template",
        "model.path",
    ]


@pytest.mark.parametrize("host", [NODE, "0.0.0.0"])
def test_a_port_of_another_server_is_reported(taken: socket.socket, host: str) -> None:
    port = taken.getsockname()[1]
    config = load("owner/name", {"serve.host": host, "serve.port": port})
    assert problems(config, NODE) == [
        f"serve.port={port} on {host} is in use; stop what listens there or choose another port "
        "(--port P, or serve.port)"
    ]
    taken.close()
    assert problems(config, NODE) == []


def test_an_ingress_may_listen_at_the_interface(taken: socket.socket) -> None:
    """If no interface is configured, the ingress listens on the address that Ray uses for the
    host."""
    port = taken.getsockname()[1]
    config = load("owner/name", {"serve.host": "interface", "serve.port": port})
    (problem,) = problems(config, NODE)
    assert problem.startswith(f"serve.port={port} on {NODE} is in use")
    assert problems(config, "127.0.0.12") == []


def test_an_interface_that_a_host_lacks_is_reported() -> None:
    config = load("owner/name", {"cluster.interface": "10.99.99.0/24", "serve.port": 0})
    (problem,) = problems(config, NODE)
    assert problem.startswith("cluster.interface='10.99.99.0/24' has no IPv4 address on the host")


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
        (problem,) = problems(config, NODE)
    assert problem.startswith(f"serve.port=0: none of the ports 21702-21703 is free on {NODE}")
