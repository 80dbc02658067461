"""The limit of pending handshakes, and which connections an inbox accepts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.transport.handshakes import PendingHandshakes, zap_reply

OURS, THEIRS = b"o" * 32, b"t" * 32
REQUEST = [b"1.0", b"7", b"swell", b"10.0.0.1", b"identity", b"CURVE", OURS]
LIMIT, HANDSHAKE_S = 3, 10.0


def test_the_clusters_key_may_connect() -> None:
    assert zap_reply(REQUEST, {OURS}) == [b"1.0", b"7", b"200", b"OK", b"", b""]


@pytest.mark.parametrize(
    "request_",
    [
        [*REQUEST[:6], THEIRS],
        [*REQUEST[:6], b""],
        [*REQUEST[:5], b"NULL", OURS],
        [*REQUEST[:5], b"PLAIN", b"user", b"password"],
        [b"2.0", *REQUEST[1:]],
        REQUEST[:6],
        [*REQUEST, b"more"],
        [],
    ],
)
def test_any_other_key_is_refused(request_: list[bytes]) -> None:
    reply = zap_reply(request_, {OURS})
    assert reply[2] == b"400" and len(reply) == 6
    assert reply[1] == (request_[1] if request_ else b"")


def test_handshakes_beyond_the_limit_are_refused_until_another_finishes() -> None:
    pending = PendingHandshakes(LIMIT, HANDSHAKE_S)
    assert [pending.accepted(fd, 0.0) for fd in range(5)] == [True] * 3 + [False] * 2
    assert pending.refused == 2
    pending.ended(3)
    pending.ended(4)
    assert not pending.accepted(5, 1.0)
    pending.ended(5)
    pending.ended(0)
    assert pending.accepted(6, 1.0)


def test_finished_and_expired_handshakes_do_not_count() -> None:
    pending = PendingHandshakes(LIMIT, HANDSHAKE_S)
    assert all(pending.accepted(fd, 0.0) for fd in range(3))
    pending.succeeded(1.0)
    assert pending.accepted(3, 2.0) and not pending.accepted(4, 2.0)
    pending.ended(4)
    assert pending.accepted(5, 10.5)


EVENTS = st.lists(st.tuples(st.sampled_from(["peer", "untrusted", "ends"]), st.integers(0, 30)))


@given(EVENTS)
def test_untrusted_peers_never_hold_more_than_the_limit(events: list[tuple[str, int]]) -> None:
    """Untrusted peers never hold more than the limit of connections. Peers succeed at once and
    stay; untrusted peers stay until they are shut down or time out. File descriptors are reused."""
    pending, now = PendingHandshakes(LIMIT, HANDSHAKE_S), 0.0
    untrusted_peers: dict[int, float] = {}
    peers: set[int] = set()
    for kind, step in events:
        now += step / 10
        for fd in [fd for fd, begun in untrusted_peers.items() if begun + HANDSHAKE_S < now]:
            del untrusted_peers[fd]
            pending.ended(fd)
        fd = next(
            number for number in range(100) if number not in untrusted_peers | dict.fromkeys(peers)
        )
        if kind == "ends" and untrusted_peers:
            pending.ended(untrusted_peers.popitem()[0])
        elif kind != "ends" and not pending.accepted(fd, now):
            pending.ended(fd)  # it is shut down
        elif kind == "peer":
            pending.succeeded(now)
            peers.add(fd)
        elif kind == "untrusted":
            untrusted_peers[fd] = now
        assert len(untrusted_peers) <= LIMIT
    assert len(pending) <= LIMIT
