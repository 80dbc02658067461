"""Groups over NCCL, with a stub of torch's backend (`nccl_stub.py`): what is asked of it, in which
order and on which thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from swell.configs.schema import ParallelConfig
from swell.worker.comm import connect, nccl_transport
from swell.worker.comm.group_secret import GroupSecret
from swell.worker.comm.groups import GroupError, ProcessGroup
from swell.worker.comm.mesh import Mesh
from swell.worker.comm.transport import AbortStuck, ForeignMember
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker.comm.nccl_stub import GARBAGE, StubBackend, StubNccl, install
from tests.worker.comm.test_mesh import in_threads


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubNccl]:
    """Puts groups on CPU over the stub."""
    for name in nccl_transport.ENVIRONMENT:
        monkeypatch.setenv(name, "changed by a user")
    monkeypatch.setitem(connect.TRANSPORTS, "cpu", nccl_transport.connect_nccl)
    nccl = install(monkeypatch)
    yield nccl
    nccl.running.set()
    nccl.aborts_end.set()
    for backend in nccl.backends:
        if not backend.aborted.is_set():
            backend.abort()


def form(world: int, *, pipeline: int = 1) -> list[Mesh]:
    """Returns the meshes of the workers of one engine. Each belongs to a thread that has ended, so
    that a test uses them from any thread."""
    store, parallel = dist.HashStore(), ParallelConfig(tensor=world // pipeline, pipeline=pipeline)
    return in_threads(world, lambda rank: Mesh.build(parallel, rank, store, timeout_s=HANG_S))


def backend(group: object) -> StubBackend:
    assert isinstance(group, ProcessGroup) and group._transport is not None
    assert isinstance(group._transport.backend, StubBackend)
    return group._transport.backend


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def settled(*meshes: Mesh) -> None:
    """Waits until the devices have computed everything."""
    groups = [group for mesh in meshes for group in (mesh.tensor, mesh.pipeline, mesh.feedback)]
    works = [w for group in groups if group.size > 1 for w in backend(group).works]
    until(lambda: all(work.done.is_set() for work in works))


def test_a_group_is_formed_without_torchs_reactions_connected_and_proved(nccl: StubNccl) -> None:
    """The environment is set before the backend is made; the backend connects without blocking, at
    once, and one operation proves its members."""
    form(2)
    for call in nccl.named("make"):
        found = {name: call.environment[name] for name in nccl_transport.ENVIRONMENT}
        assert found == nccl_transport.ENVIRONMENT
        assert call.options.config.blocking == 0
        assert call.options._timeout == timedelta(seconds=HANG_S)
    assert nccl_transport.ENVIRONMENT["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert nccl_transport.ENVIRONMENT["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    for rank in range(2):
        assert nccl.of_rank(rank) == ["make", "connect", "_allgather_base"]


def test_a_member_without_the_secret_is_noticed(
    nccl: StubNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ours, forged = dist.HashStore(), GroupSecret(b"x", "g"), GroupSecret(b"x", "g")
    monkeypatch.setattr(forged, "token", GroupSecret(b"theirs", "g").token)

    def work(rank: int) -> str:
        secret, aborted = (ours, forged)[rank], threading.Event()
        with pytest.raises(ForeignMember) as raised:
            connect.connect("cpu", store, rank, 2, HANG_S, aborted, secret)
        return str(raised.value)

    assert "ranks [1] of 2 do not know the secret" in in_threads(2, work)[0]


def test_operations_run_on_the_current_stream_and_gather_into_one_tensor(nccl: StubNccl) -> None:
    meshes = form(2)
    parts = [torch.arange(12.0).view(2, 3, 2) + 100 * rank for rank in range(2)]
    nccl.host_waits = True

    def work(rank: int) -> dict[int, torch.Tensor]:
        group = meshes[rank].tensor
        group.all_reduce(torch.ones(2))
        group.broadcast(torch.ones(2), 0)
        group.reduce_scatter(torch.ones(4))
        return {dim: group.all_gather(parts[rank], dim) for dim in (0, 1, 2, -1)}

    for gathered in in_threads(2, work):
        for dim, found in gathered.items():
            assert torch.equal(found, torch.cat(parts, dim)), dim
    used = [call for call in nccl.calls if call.name not in ("make", "connect")][2:]
    assert {call.name for call in used} == {
        "allreduce",
        "broadcast",
        "_reduce_scatter_base",
        "_allgather_base",
    }
    assert not any(call.options.asyncOp for call in used)


def test_all_communicators_are_aborted_together_on_threads_of_their_own(nccl: StubNccl) -> None:
    """Each abort waits for the kernels of both communicators, so the second one must not wait for
    the first. The caller, which may be the heartbeat thread, waits for neither."""
    meshes = form(4, pipeline=2)
    me = meshes[0]
    me.tensor.all_reduce(torch.ones(1))
    result = torch.zeros(1)
    me.pipeline.recv(result, 1)
    nccl.aborts_end.clear()
    me.abort()
    until(lambda: len([call for call in nccl.named("abort") if call.rank == 0]) >= 3)
    assert all(call.thread != threading.get_ident() for call in nccl.named("abort"))
    with pytest.raises(GroupError, match="'tensor0' was aborted"):
        me.check()
    me.abort()
    me.abort()
    nccl.aborts_end.set()
    for group in (me.tensor, me.pipeline, me.feedback):
        group.finish_abort()
    assert result.item() == GARBAGE
    assert len(nccl.named("abort")) == 3, "a repeated abort does nothing"
    me.close()


def test_an_abort_that_does_not_end_is_not_an_error_of_the_group(
    nccl: StubNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort that does not end is the worker's own error: the engine replaces the worker."""
    monkeypatch.setattr(nccl_transport, "ABORT_S", 0.05)
    me = form(2)[0]
    nccl.aborts_end.clear()
    me.abort()
    me.begin(1)
    with pytest.raises(AbortStuck, match="must be replaced") as raised:
        me.regroup(GroupPlan(1), dist.HashStore())
    assert not isinstance(raised.value, GroupError)
    with pytest.raises(AbortStuck):
        me.close()


def test_groups_form_again_after_an_abort(nccl: StubNccl) -> None:
    meshes, store = form(2), dist.HashStore()
    meshes[0].tensor.all_reduce(torch.ones(1))

    def again(rank: int) -> None:
        meshes[rank].abort()
        meshes[rank].begin(1)
        meshes[rank].regroup(GroupPlan(1), store, None, HANG_S)

    in_threads(2, again)
    sums = [mesh.tensor.all_reduce(torch.ones(1)) for mesh in meshes]
    settled(*meshes)
    assert [total.item() for total in sums] == [2, 2]


def test_a_failure_that_nccl_reports_aborts_the_groups(nccl: StubNccl) -> None:
    """A failure that NCCL reports becomes the error that gloo raises in the operation."""
    me = form(4, pipeline=2)[0]
    me.poll()
    me.check()
    backend(me.pipeline).error = ErrorType.COMM_ERROR
    me.poll()
    with pytest.raises(GroupError, match=r"'pipeline0' was aborted or left: .* COMM_ERROR"):
        me.pipeline.check()
    with pytest.raises(GroupError, match="'tensor0'"):
        me.tensor.all_reduce(torch.ones(1))
    until(lambda: len([call for call in nccl.named("abort") if call.rank == 0]) >= 3)


def test_a_message_arrives_although_its_sender_leaves_at_once(nccl: StubNccl) -> None:
    store, got, closing = dist.HashStore(), torch.zeros(1), threading.Event()

    def work(rank: int) -> None:
        mesh = Mesh.build(ParallelConfig(pipeline=2), rank, store, timeout_s=HANG_S)
        if rank == 0:
            nccl.running.clear()
            mesh.pipeline.send(torch.full((1,), 7.0), 1).wait()
            closing.set()
        else:
            closing.wait(HANG_S)
            mesh.pipeline.recv(got, 0)
            threading.Timer(0.05, nccl.running.set).start()
        mesh.close()

    in_threads(2, work)
    assert got.item() == 7


def test_a_drain_ends_when_every_worker_has_everything(nccl: StubNccl) -> None:
    meshes, got = form(2, pipeline=2), torch.zeros(1)
    meshes[0].pipeline.send(torch.full((1,), 7.0), 1).wait()
    sender = threading.Thread(target=meshes[0].drain)
    sender.start()
    sender.join(0.1)
    assert sender.is_alive(), "the receiver has not drained"
    meshes[1].pipeline.recv(got, 0)
    meshes[1].drain()
    sender.join(HANG_S)
    assert got.item() == 7 and not sender.is_alive()


def test_an_aborted_group_is_left_without_waiting_for_the_device(nccl: StubNccl) -> None:
    me = form(2)[0]
    t = torch.ones(1)
    me.tensor.all_reduce(t)  # the peer never joins
    me.abort()
    me.close()
    assert t.item() == GARBAGE


def test_an_abort_ends_the_wait_for_a_device_while_a_group_is_left(nccl: StubNccl) -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        mesh = Mesh.build(ParallelConfig(tensor=2), rank, store, timeout_s=1e6)
        if rank == 0:
            mesh.tensor.all_reduce(torch.ones(1))  # the peer never joins
            threading.Timer(0.05, mesh.abort).start()
            mesh.close()

    in_threads(2, work)


def test_an_abort_ends_forming(nccl: StubNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort ends forming while a peer that has published its address does not connect."""
    store, begun = dist.HashStore(), threading.Event()
    connect_device = StubBackend.eager_connect_single_device

    def connect_some(backend: StubBackend, device: torch.device) -> None:
        begun.set()
        if backend.rank == 0:
            connect_device(backend, device)

    monkeypatch.setattr(StubBackend, "eager_connect_single_device", connect_some)

    def work(rank: int) -> str:
        mesh = Mesh.build(ParallelConfig(tensor=2), rank)
        mesh.begin(1)
        threading.Timer(0.1, mesh.abort).start()
        with pytest.raises(GroupError) as raised:
            mesh.regroup(GroupPlan(1), store, None, HANG_S)
        return str(raised.value)

    for text in in_threads(2, work):
        assert "did not connect before it was aborted" in text
    assert begun.is_set()
