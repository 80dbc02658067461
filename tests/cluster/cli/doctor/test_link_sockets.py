"""Real connections on this machine: a refused port, a silent one and a foreign server are
distinguished."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from swell.cluster.cli.doctor.facts import Listener, Part, Target
from swell.cluster.cli.doctor.probes.links import (
    TOKEN_BYTES,
    LinkListeners,
    try_link,
    try_links,
)

HOST = "127.0.0.1"
TOKEN, OTHER = b"t" * TOKEN_BYTES, b"o" * TOKEN_BYTES
ANY = Part(name="engines", first=0, last=0, host=HOST)
AHEAD_S = 100.0


@pytest.fixture
def listeners() -> Iterator[LinkListeners]:
    ahead = LinkListeners(TOKEN, clock=lambda: time.time() + AHEAD_S)
    with contextlib.closing(ahead):
        yield ahead


def target(port: int) -> Target:
    return Target(name="b", part="engines", host=HOST, port=port)


def at(listener: Listener) -> Target:
    assert listener.error is None
    return target(listener.port)


@contextlib.contextmanager
def foreign_server(answer: bytes | None) -> Iterator[Target]:
    """Starts a foreign server that sends `answer` and closes. If `answer` is None, it never
    answers."""
    with socket.create_server((HOST, 0)) as server:

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(TOKEN_BYTES)
                sock.sendall(answer or b"")

        thread = threading.Thread(target=run)
        if answer is not None:
            thread.start()
        yield target(server.getsockname()[1])
        if answer is not None:
            thread.join()


def test_a_reached_listener_returns_its_clock(listeners: LinkListeners) -> None:
    link = try_link("a", at(listeners.open(ANY)), TOKEN, 10.0)
    assert (link.source, link.target, link.part, link.error) == ("a", "b", "engines", None)
    assert abs(link.offset_s - AHEAD_S) <= link.round_trip_s / 2 + 0.001
    assert 0 < link.round_trip_s < 10.0


def test_a_listener_uses_a_free_port_of_its_share(listeners: LinkListeners) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        part = Part(name="coordinator", first=port, last=port, host=HOST)
        found = listeners.open(part)
        assert found.error is not None and f"none of the ports {port}-{port} is free" in found.error
    elsewhere = listeners.open(Part(name="engines", first=0, last=0, host="203.0.113.9"))
    assert elsewhere.error is not None and elsewhere.port == 0


def test_each_failure_of_a_link_has_its_own_error(listeners: LinkListeners) -> None:
    port = listeners.open(ANY).port
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        refused = target(closed.getsockname()[1])
        assert try_link("a", refused, TOKEN, 10.0).error == "refused"
    with foreign_server(None) as silent:
        assert try_link("a", silent, TOKEN, 0.2).error == "no answer after 0.2 s"
    with foreign_server(OTHER) as other:
        assert try_link("a", other, TOKEN, 10.0).error == "another program answers there"
    with foreign_server(b"") as gone:
        error = try_link("a", gone, TOKEN, 10.0).error
        assert error == "the other end closed the connection"
    assert try_link("a", target(port), OTHER, 10.0).error is not None


def test_a_hanging_attempt_delays_no_other(listeners: LinkListeners) -> None:
    with foreign_server(None) as silent:
        found = try_links("a", [silent, at(listeners.open(ANY)), silent], TOKEN, 3.0)
    assert [link.error for link in found] == [
        "no answer after 3 s",
        None,
        "no answer after 3 s",
    ]
    assert try_links("a", [], TOKEN, 0.5) == []


def test_all_sockets_are_closed() -> None:
    before = threading.active_count()
    with contextlib.closing(LinkListeners(TOKEN)) as some:
        port = some.open(ANY).port
        idle = socket.create_connection((HOST, port))
    with idle:
        assert idle.recv(1) == b""
        assert try_link("a", target(port), TOKEN, 10.0).error == "refused"
    assert threading.active_count() == before
