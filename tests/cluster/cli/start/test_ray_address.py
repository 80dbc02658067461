"""An address at which no Ray can answer is refused at once, instead of after Ray's retries of a
minute."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from swell.cluster.cli.main import main
from swell.cluster.cli.start import ray_address
from swell.cluster.cli.start.ray_address import probe_address
from swell.configs.section import ConfigError

SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def answer_once(server: socket.socket, text: bytes) -> threading.Thread:
    def run() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(24)
            connection.sendall(text)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("head", "is not HOST:PORT"),
        ("head:", "is not HOST:PORT"),
        ("head:0", "is not HOST:PORT"),
        ("head:70000", "is not HOST:PORT"),
        (":6379", "is not HOST:PORT"),
        ("ray://head:10001", "Ray Client is not supported"),
        ("no-such-host.invalid:6379", "cannot be reached"),
        ("127.0.0.1:1", "cannot be reached"),
    ],
)
def test_an_address_without_ray_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as found:
        probe_address(address)
    assert repr(address) in str(found.value) and "6379" in str(found.value)


@pytest.mark.parametrize("text", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", b""])
def test_a_server_other_than_the_gcs_is_refused(listener: socket.socket, text: bytes) -> None:
    thread = answer_once(listener, text)
    with pytest.raises(ConfigError, match="not the address of Ray's GCS"):
        probe_address(address_of(listener))
    thread.join()


def test_a_silent_server_is_refused(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_address, "_PROBE_S", 0.1)
    with pytest.raises(ConfigError, match="not the address of Ray's GCS"):
        probe_address(address_of(listener))


def test_a_grpc_server_is_left_to_ray(listener: socket.socket) -> None:
    thread = answer_once(listener, SETTINGS_FRAME)
    probe_address(address_of(listener))
    thread.join()
    probe_address("auto")


def test_swell_serve_reports_a_wrong_address_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "configs/models/nano"
    assert main(["serve", model, "--port", "0", "--address", "127.0.0.1:1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("swell: --address='127.0.0.1:1' cannot be reached")
