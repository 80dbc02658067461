"""A process becomes a member of a plan's groups only if it knows the plan's secret."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
import torch
import torch.distributed as dist

from swell.worker.comm.connect import connect
from swell.worker.comm.gloo_transport import refuse_connections
from swell.worker.comm.group_secret import TOKEN_BYTES, ForeignAddress, GroupSecret
from swell.worker.comm.mesh import GroupError, Mesh
from swell.worker.comm.transport import ForeignMember, PeersAbsent
from swell.worker.wire import GroupPlan
from tests.worker.comm.test_addresses import PAIR
from tests.worker.comm.test_mesh import in_threads

OURS, THEIRS = GroupSecret(b"ours", "group"), GroupSecret(b"theirs", "group")


def test_prefixes_signatures_and_tokens_differ_by_secret_group_and_rank() -> None:
    groups = [GroupSecret(key, name) for key in (b"a", b"b") for name in ("x", "y")]
    assert len({group.prefix for group in groups}) == 4
    signed = {group.sign(rank, "address", "h 1") for group in groups for rank in (0, 1)}
    tokens = {group.token(rank) for group in groups for rank in (0, 1)}
    assert len(signed) == len(tokens) == 8
    assert {len(token) for token in tokens} == {TOKEN_BYTES}


@pytest.mark.parametrize(
    "signed",
    [
        THEIRS.sign(1, "address", "10.0.0.1 7"),
        OURS.sign(0, "address", "10.0.0.1 7"),
        OURS.sign(1, "address", "10.0.0.1 7").replace(" 7", " 8"),
        OURS.sign(1, "opened", "10.0.0.1 7"),
        GroupSecret(b"ours", "another").sign(1, "address", "10.0.0.1 7"),
        "10.0.0.1 7",
        "",
        "10.0.0.1 7 \N{SNOWMAN}",
    ],
)
def test_an_address_signed_by_another_group_is_refused(signed: str) -> None:
    assert OURS.open(1, "address", OURS.sign(1, "address", "10.0.0.1 7")) == "10.0.0.1 7"
    with pytest.raises(ForeignAddress, match=r"rank 1 .* docs/operate/security\.md"):
        OURS.open(1, "address", signed)


def test_ranks_with_different_secrets_do_not_find_each_other() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def form(rank: int) -> str:
        secret = (OURS, THEIRS)[rank]
        with pytest.raises(PeersAbsent) as raised:
            connect("cpu", store, rank, 2, 0.3, threading.Event(), secret)
        return str(raised.value)

    assert all("did not connect" in text for text in in_threads(2, form))


def test_an_untrusted_peer_that_writes_into_the_store_is_noticed() -> None:
    """An untrusted peer that writes into the store is noticed. Anyone who can reach the store can
    list its keys, and so learn the prefix."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set(f"{OURS.prefix}/address1", THEIRS.sign(1, "address", "127.0.0.1 9"))
    with pytest.raises(ForeignAddress, match="rank 1"):
        connect("cpu", store, 0, 2, 5.0, threading.Event(), OURS)


def test_a_member_without_the_secret_is_noticed_through_its_connections(monkeypatch) -> None:
    """A member without the secret is noticed through its connections, even if its entry in the
    store is valid and it takes part in the collectives."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    forged = GroupSecret(b"ours", "group")
    monkeypatch.setattr(forged, "token", THEIRS.token)

    def form(rank: int) -> str:
        secret = (OURS, forged)[rank]
        with pytest.raises((ForeignMember, RuntimeError)) as raised:
            connect("cpu", store, rank, 2, 60.0, threading.Event(), secret)
        return str(raised.value)

    honest, _ = in_threads(2, form)
    assert "ranks [1] of 2 do not know the secret" in honest


def test_a_failed_proof_is_a_failure_of_the_group() -> None:
    """A failed proof is a failure of the group, so the engine reports it and receives another plan
    with another secret."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    plan = GroupPlan(1, epoch=7, engines=2, index=0, expert_secret=b"ours")
    own = GroupSecret(b"ours", "epoch7/data0.0")
    store.set(f"{own.prefix}/address1", THEIRS.sign(1, "address", "127.0.0.1 9"))
    mesh = Mesh.build(PAIR, 0)
    mesh.begin(1)
    with pytest.raises(GroupError, match=r"could not be formed at .* was not written by a member"):
        mesh.regroup(plan, expert_store=store, timeout_s=5)


def test_a_formed_group_refuses_connections_and_continues() -> None:
    """A formed group accepts no connection and continues. Gloo itself would keep any connection
    forever, also that of an untrusted peer."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    formed = threading.Barrier(2)

    def work(rank: int) -> list[bool]:
        group = connect("cpu", store, rank, 2, 20.0, threading.Event(), OURS)
        answered = []
        for address in group._members:
            formed.wait()
            try:
                socket.create_connection(address, 0.3).close()
                answered.append(True)
            except TimeoutError:
                answered.append(False)
            t = torch.ones(1)
            group.wait(group.backend.allreduce([t]))
            assert t.item() == 2
        group.close()
        return answered

    assert in_threads(2, work) == [[False, False]] * 2


def test_a_socket_that_refuses_keeps_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        before = socket.create_connection(address, 2)
        accepted, _ = listener.accept()
        refuse_connections(address)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.2)
        before.sendall(struct.pack("<q", 7))
        assert accepted.recv(8) == struct.pack("<q", 7)
        before.close()
        accepted.close()
