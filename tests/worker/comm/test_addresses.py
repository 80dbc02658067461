"""A worker publishes the configured address to its peers, not the one that its host's name resolves
to."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from swell.configs.schema import load
from swell.worker.comm import gloo_transport
from swell.worker.comm.connect import connect
from swell.worker.comm.group_secret import GroupSecret
from swell.worker.comm.groups import make_group
from swell.worker.comm.mesh import GroupError, Mesh
from swell.worker.wire import GroupPlan
from swell.worker.worker import Worker
from tests.worker.comm.test_mesh import in_threads

SECRET = GroupSecret(b"secret", "group")
HOSTS = ("127.0.0.3", "127.0.0.5")
PAIR = load({"model": {"path": "m"}, "parallel": {"data": 2, "expert": True}}).parallel


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


Addresses = dict[tuple[str, int], str]
"""Prefix of a group's keys, rank -> the address that the rank has published."""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    found: Addresses = {}
    sign = GroupSecret.sign

    def note_and_sign(self: GroupSecret, rank: int, topic: str, text: str) -> str:
        if topic == "address":
            found[self.prefix, rank] = text
        return sign(self, rank, topic, text)

    monkeypatch.setattr(GroupSecret, "sign", note_and_sign)
    return found


def hosts(published: Addresses, secret: GroupSecret) -> list[str]:
    """Returns the published hosts of the two ranks of a group."""
    return [published[secret.prefix, rank].split()[0] for rank in range(2)]


def test_peers_connect_to_each_others_configured_address(store, published) -> None:
    def form(rank: int) -> None:
        connect("cpu", client(store), rank, 2, 20, threading.Event(), SECRET, HOSTS[rank]).close()

    in_threads(2, form)
    assert hosts(published, SECRET) == list(HOSTS)


def test_groups_between_engines_are_at_the_address_of_the_worker(store, published) -> None:
    def form(index: int) -> None:
        mesh = Mesh.build(PAIR, 0, host=HOSTS[index])
        mesh.begin(1)
        mesh.regroup(GroupPlan(1, epoch=7, engines=2, index=index), expert_store=client(store))
        mesh.close()

    in_threads(2, form)
    for group in ("data0.0", "sync0.0", "expert0"):
        assert hosts(published, GroupSecret(b"", f"epoch7/{group}")) == list(HOSTS)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_failed_group_formation_names_the_address_and_the_absent_ranks(store, is_aborted) -> None:
    mesh = Mesh.build(PAIR, 0, host=HOSTS[0])
    mesh.begin(1)
    plan = GroupPlan(1, epoch=7, engines=2, index=0)
    if is_aborted:
        threading.Timer(0.1, mesh.abort).start()
    text = rf"at {HOSTS[0]}: ranks \[1\] of 2 did not connect"
    with pytest.raises(GroupError, match=text) as raised:
        mesh.regroup(plan, expert_store=client(store), timeout_s=30 if is_aborted else 0.1)
    assert raised.value.absent == (1,)


def test_absent_peers_are_named_by_engine_and_not_by_rank(store) -> None:
    """Absent peers are named by engine, not by rank; each engine has two ranks of an expert
    group."""
    parallel = load({"model": {"path": "m"}, "parallel": {"expert": True, "tensor": 2}}).parallel
    mesh = Mesh.build(parallel, 1)
    mesh.begin(1)
    keys = client(store)
    group = mesh.expert = make_group("expert0", 1, 6)
    for rank in (0, 2, 3):
        signed = SECRET.sign(rank, "address", "127.0.0.1 1")
        dist.PrefixStore(SECRET.prefix, store).set(f"address{rank}", signed)
    with pytest.raises(GroupError) as raised:
        mesh._open(group, "cpu", 2, keys, 0.1, SECRET)
    assert raised.value.absent == (2,)


def test_an_unreachable_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not answer is named; a host that refuses a connection is reachable."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    waiting = [socket.socket() for _ in range(3)]
    for one in waiting:  # its queue is full, so it accepts no further connection
        one.setblocking(False)
        one.connect_ex(silent.getsockname())
    unused = socket.socket()
    unused.bind(("127.0.0.1", 0))
    monkeypatch.setattr(gloo_transport, "_PROBE_S", 0.2)
    assert not gloo_transport._answers(silent.getsockname())
    assert gloo_transport._answers(unused.getsockname())
    for one in (*waiting, silent, unused):
        one.close()


def test_the_store_of_a_worker_is_at_its_address() -> None:
    worker = Worker(load({"model": {"path": "m", "device": "cpu"}}), host=HOSTS[1])
    host, port = worker.open_store()
    assert host == HOSTS[1]
    dist.TCPStore(host, port, is_master=False).set("key", "value")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[0], port), timeout=5)
    worker.shutdown()


def test_the_store_of_a_worker_is_in_the_range_of_ports() -> None:
    source = {"model": {"path": "m", "device": "cpu"}, "cluster": {"ports": "21500-21515"}}
    workers = [Worker(load(source), host=HOSTS[1]) for _ in range(2)]
    ports = {worker.open_store()[1] for worker in workers}
    assert len(ports) == 2 and ports <= {*range(21_504, 21_516)}
    for worker in workers:
        worker.shutdown()
