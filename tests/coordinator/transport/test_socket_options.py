"""A link that works again is used at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from swell.coordinator.transport.socket_options import connect_soon

SOON_S = 60.0
"""A timeout that is only reached on failure, in seconds."""
HOST = "127.0.0.7"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yields a port whose connection attempts are dropped, because the listener's queue is full."""
    with socket.socket() as door, socket.socket() as first, socket.socket() as second:
        door.bind((HOST, 0))
        door.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(door.getsockname())
        yield door.getsockname()[1]


def test_an_attempt_that_nobody_answers_is_followed_by_a_new_one(silent_port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as outlet:
        outlet.linger = 0
        connect_soon(outlet)
        retried = outlet.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        outlet.connect(f"tcp://{HOST}:{silent_port}")
        for _ in range(2):  # ZeroMQ sets the delay to the next attempt before each attempt
            assert retried.poll(SOON_S * 1000), "it waits for TCP, for up to two minutes"
            assert recv_monitor_message(retried)["event"] == zmq.EVENT_CONNECT_RETRIED
        retried.close(linger=0)
        outlet.disable_monitor()
