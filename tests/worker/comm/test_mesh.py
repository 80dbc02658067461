"""Groups between threads and between processes, epochs side by side, and the effect of a death."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swell.configs.schema import ParallelConfig
from swell.worker.comm import gloo_transport
from swell.worker.comm.mesh import Group, GroupError, Mesh, ProcessGroup, SoloGroup
from swell.worker.comm.shared_memory_transport import SharedMemoryTransport
from swell.worker.comm.transport import Transport
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

PAIRS = {"tensor": ParallelConfig(tensor=2), "pipeline": ParallelConfig(pipeline=2)}
"""Axis -> two workers along it. Those of the tensor axis use shared memory, the others gloo."""


def in_threads(world: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs `work(rank)` of every rank in parallel; raises the first exception of the ranks,
    otherwise returns their results."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_grid_of_ranks() -> None:
    store = dist.HashStore()

    def work(rank: int) -> Any:
        mesh = Mesh.build(ParallelConfig(tensor=2, pipeline=3), rank, store, timeout_s=HANG_S)
        place = (mesh.stage, mesh.tensor_rank, mesh.is_first_stage, mesh.is_last_stage)
        same_stage = mesh.tensor.all_gather(torch.tensor([rank]), 0).tolist()
        same_column = mesh.pipeline.all_gather(torch.tensor([rank]), 0).tolist()
        mesh.close()
        return place, same_stage, same_column

    assert in_threads(6, work) == [
        ((0, 0, True, False), [0, 1], [0, 2, 4]),
        ((0, 1, True, False), [0, 1], [1, 3, 5]),
        ((1, 0, False, False), [2, 3], [0, 2, 4]),
        ((1, 1, False, False), [2, 3], [1, 3, 5]),
        ((2, 0, False, True), [4, 5], [0, 2, 4]),
        ((2, 1, False, True), [4, 5], [1, 3, 5]),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]
)
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_operations(dtype: torch.dtype, axis: str) -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        mesh = Mesh.build(PAIRS[axis], rank, store, timeout_s=HANG_S)
        group: Any = getattr(mesh, axis)
        uses_memory = isinstance(group._transport, SharedMemoryTransport)
        assert uses_memory == (axis == "tensor")
        t = torch.full((2, 3), rank + 1).to(dtype)
        assert group.all_reduce(t) is t
        assert t.tolist() == [[3] * 3] * 2
        strided = torch.full((2, 6), rank + 1).to(dtype)[:, ::2]
        assert group.all_reduce(strided).tolist() == [[3] * 3] * 2
        gathered = group.all_gather(torch.full((2, 1), rank).to(dtype), 1)
        assert gathered.tolist() == [[0, 1], [0, 1]]
        assert group.all_gather(torch.empty(0, 4, dtype=dtype), 1).shape == (0, 8)
        assert group.all_reduce(torch.empty(0, 4, dtype=dtype)).shape == (0, 4)
        scattered = group.reduce_scatter((torch.arange(8).view(4, 2) + rank).to(dtype))
        assert scattered.tolist() == [[[1, 3], [5, 7]], [[9, 11], [13, 15]]][rank]
        assert group.broadcast(torch.full((2,), rank).to(dtype), 1).tolist() == [1, 1]
        if axis == "tensor":
            mesh.close()
            return
        if rank == 0:
            handles = [group.send(torch.full((2,), i).to(dtype), 1) for i in range(3)]
            for handle in handles:
                handle.wait()
        else:
            got = [group.recv(torch.empty(2, dtype=dtype), 0).tolist() for _ in range(3)]
            assert got == [[0, 0], [1, 1], [2, 2]]
        mesh.close()

    in_threads(2, work)


@pytest.mark.parametrize(
    ("exact", "operations"),
    [(True, ["alltoall_base", "_allgather_base"]), (False, ["allreduce"])],
)
def test_an_exact_group_adds_in_order_on_every_device(
    monkeypatch: pytest.MonkeyPatch, exact: bool, operations: list[str]
) -> None:
    """A tensor without memory stands for one of a GPU."""
    called: list[str] = []
    monkeypatch.setattr(ProcessGroup, "_run", lambda self, name, *_: called.append(name))
    mesh = Mesh.build(ParallelConfig(tensor=3), 1, exact=exact)
    t = torch.empty(2, 5, device="meta")
    assert mesh.tensor.all_reduce_in_order(t) is t
    assert called == operations and mesh.exact == exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_a_row_of_a_sum_has_the_same_bits_in_any_batch(tensor: int, dtype: torch.dtype) -> None:
    """A row of an ordered sum has the same bits by itself and among others, also if it is
    strided."""
    store, rows, size = dist.HashStore(), 7, 37

    def terms(rank: int) -> torch.Tensor:
        return torch.randn(rows, size, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def work(rank: int) -> torch.Tensor:
        mesh = Mesh.build(ParallelConfig(tensor=tensor), rank, store, timeout_s=HANG_S)
        group, own = mesh.tensor, terms(rank)
        whole = own.clone()
        assert group.all_reduce_in_order(whole) is whole
        assert group.all_reduce_in_order(own[:0].clone()).shape == (0, size)
        apart = [group.all_reduce_in_order(row.clone()) for row in own]
        apart.append(group.all_reduce_in_order(own.repeat(1, 2)[1:3, ::2])[:, : size // 2 + 1][0])
        mesh.close()
        assert torch.equal(torch.stack(apart[:-1]), whole)
        assert torch.equal(apart[-1], whole[1, ::2])
        return whole

    found = in_threads(tensor, work)
    assert all(torch.equal(one, found[0]) for one in found)
    total = torch.stack([terms(rank).double() for rank in range(tensor)]).sum(0)
    torch.testing.assert_close(
        found[0].double(), total, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05
    )


def test_a_group_of_one_needs_no_store() -> None:
    mesh = Mesh.build(ParallelConfig(), 0)
    assert isinstance(mesh.tensor, SoloGroup)
    assert mesh.is_first_stage
    assert mesh.is_last_stage
    t = torch.ones(3)
    assert mesh.tensor.all_reduce(t) is t
    assert mesh.tensor.all_gather(t, 0) is t
    mesh.close()


def test_the_next_epoch_forms_next_to_the_first() -> None:
    """The next epoch forms while the first one runs: the old group still works, and closing it does
    not affect the new one."""
    store = dist.HashStore()

    def work(rank: int) -> None:
        parallel = ParallelConfig(tensor=2)
        old = Mesh.build(parallel, rank, store, epoch=0, timeout_s=HANG_S)
        new = Mesh.build(parallel, rank, store, epoch=1, timeout_s=HANG_S)
        assert old.tensor.all_reduce(torch.ones(1)).item() == 2
        assert new.tensor.all_reduce(torch.ones(1)).item() == 2
        old.close()
        assert new.tensor.all_reduce(torch.ones(1)).item() == 2
        new.close()

    in_threads(2, work)


def test_leaving_a_group_wakes_the_peer() -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        mesh = Mesh.build(ParallelConfig(tensor=2), rank, store, timeout_s=HANG_S)
        mesh.tensor.all_reduce(torch.ones(1))
        if rank == 0:
            time.sleep(0.2)
            mesh.close()
            return
        before = time.monotonic()
        with pytest.raises(GroupError, match=r"'tensor0': allreduce"):
            mesh.tensor.all_reduce(torch.ones(1))
        assert time.monotonic() - before < HANG_S, "it has waited for the time limit"
        mesh.close()

    in_threads(2, work)


def test_a_peer_that_never_connects_is_an_error() -> None:
    with pytest.raises(GroupError, match=r"'tensor0'.*ranks \[1\] of 2 did not connect in 1 s"):
        Mesh.build(ParallelConfig(tensor=2), 0, dist.HashStore(), timeout_s=1)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_peer_is_waited_for(slow: int) -> None:
    """A slow peer is waited for, longer than the time after which an aborted operation is given
    up."""
    store = dist.HashStore()

    def work(rank: int) -> list[float]:
        mesh = Mesh.build(ParallelConfig(pipeline=2), rank, store, timeout_s=HANG_S)
        group, got = mesh.pipeline, torch.empty(1)
        if rank == slow:
            time.sleep(3 * gloo_transport._POLL_TIMEOUT.total_seconds())
        if rank == 0:
            group.send(torch.ones(1), 1).wait()
            group.recv(got, 1)
        else:
            group.recv(got, 0)
            group.send(got + 1, 0).wait()
        total = group.all_reduce(torch.ones(1))
        mesh.close()
        return [got.item(), total.item()]

    assert in_threads(2, work) == [[2, 2], [1, 2]]


COLLECTIVE: dict[str, Callable[[Group], Any]] = {
    "allreduce": lambda group: group.all_reduce(torch.ones(3)),
    "allgather": lambda group: group.all_gather(torch.ones(3), 0),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(4)),
}
BLOCKING: dict[str, Callable[[Group], Any]] = {
    **COLLECTIVE,
    "recv": lambda group: group.recv(torch.ones(3), 1),
    "send": lambda group: group.send(torch.ones(3), 1).wait(),
}


@pytest.mark.parametrize(
    ("axis", "operation"),
    [*(("tensor", name) for name in COLLECTIVE), *(("pipeline", name) for name in BLOCKING)],
)
def test_another_thread_aborts_a_blocked_operation(axis: str, operation: str) -> None:
    """Another thread can abort a blocked operation, while the peer is alive but does not join."""
    store, alone = dist.HashStore(), threading.Event()
    meshes: list[Any] = [None, None]

    def work(rank: int) -> None:
        mesh = meshes[rank] = Mesh.build(PAIRS[axis], rank, store, timeout_s=HANG_S)
        group: Any = getattr(mesh, axis)
        group.all_reduce(torch.ones(1))
        if rank == 1:
            alone.wait(HANG_S)
            return
        threading.Timer(0.1, mesh.abort).start()
        before = time.monotonic()
        with pytest.raises(GroupError, match=rf"'{axis}0'"):
            BLOCKING[operation](group)
        assert time.monotonic() - before < HANG_S
        with pytest.raises(GroupError, match="aborted"):
            mesh.check()
        alone.set()

    in_threads(2, work)

    def again(rank: int) -> float:
        meshes[rank].begin(1)
        meshes[rank].regroup(GroupPlan(1), store, None, 30)
        return float(getattr(meshes[rank], axis).all_reduce(torch.ones(1)))

    groups = [getattr(mesh, axis) for mesh in meshes]
    assert in_threads(2, again) == [2, 2]
    assert [getattr(mesh, axis) for mesh in meshes] == groups, "layers keep the group"
    for mesh in meshes:
        mesh.close()


def test_another_thread_aborts_forming() -> None:
    mesh = Mesh.build(ParallelConfig(tensor=2), 0)
    mesh.begin(1)
    timer = threading.Timer(0.1, mesh.abort)
    timer.start()
    before = time.monotonic()
    with pytest.raises(GroupError, match=r"'tensor0'.*aborted"):
        mesh.regroup(GroupPlan(1), dist.HashStore(), None, HANG_S)
    assert time.monotonic() - before < HANG_S
    with pytest.raises(GroupError, match="'tensor0'"):
        mesh.tensor.all_reduce(torch.ones(1))


def test_an_abort_of_an_older_plan_is_ignored() -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        mesh = Mesh.build(ParallelConfig(tensor=2), rank, store, epoch=4, timeout_s=HANG_S)
        mesh.abort(3)
        assert mesh.tensor.all_reduce(torch.ones(1)).item() == 2
        mesh.close()

    in_threads(2, work)


def test_groups_between_engines() -> None:
    """The groups between two engines of two stages with two ranks each: their members, and the
    groups that remain with one engine."""
    parallel, store = ParallelConfig(tensor=2, pipeline=2, expert=True), dist.HashStore()
    own = [dist.HashStore(), dist.HashStore()]

    def work(worker: int) -> Any:
        index, rank = divmod(worker, 4)
        mesh = Mesh.build(parallel, rank, own[index], timeout_s=HANG_S)
        mesh.begin(1)
        mesh.regroup(GroupPlan(1, None, 7, 2, index), None, store, 30)
        me = torch.tensor([worker])
        groups = (mesh.data, mesh.sync, mesh.expert)
        met = [group.all_gather(me, 0).tolist() for group in groups]
        mesh.begin(2)
        mesh.regroup(GroupPlan(2, None, 8), None, None, 30)
        assert mesh.expert is mesh.tensor
        assert isinstance(mesh.data, SoloGroup)
        assert isinstance(mesh.sync, SoloGroup)
        assert mesh.tensor.all_gather(me, 0).tolist() == [worker & ~1, worker | 1]
        mesh.close()
        return met

    want = [[[r, r + 4]] * 2 + [[s, s + 1, s + 4, s + 5]] for r, s in enumerate((0, 0, 2, 2))]
    assert in_threads(8, work) == want * 2


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_closing_frees_files_and_threads(axis: str) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        store = dist.HashStore()

        def work(rank: int) -> None:
            mesh = Mesh.build(PAIRS[axis], rank, store, timeout_s=HANG_S)
            getattr(mesh, axis).all_reduce(torch.ones(1))
            mesh.close()
            mesh.close()

        in_threads(2, work)

    once()
    before = count()
    for _ in range(3):
        once()
    deadline = time.monotonic() + HANG_S
    while any(now > then for now, then in zip(count(), before, strict=True)):
        assert time.monotonic() < deadline, (count(), before)
        time.sleep(0.05)


def test_a_hundred_epochs_leave_nothing() -> None:
    """Files, threads, transports and keys of the stores of earlier groups are gone."""
    own_stores, store = [dist.HashStore(), dist.HashStore()], dist.HashStore()
    parallel = ParallelConfig(tensor=2, expert=True)
    meshes = in_threads(4, lambda rank: Mesh.build(parallel, rank % 2))

    def form(epoch: int) -> None:
        def work(rank: int) -> None:
            engine, mesh = rank // 2, meshes[rank]
            mesh.begin(epoch)
            mesh.regroup(GroupPlan(epoch, None, epoch, 2, engine), own_stores[engine], store, 30)
            for group in (mesh.tensor, mesh.data, mesh.sync, mesh.expert):
                assert group.all_reduce(torch.ones(1)).item() == group.size

        in_threads(4, work)

    def kept() -> list[int]:
        gc.collect()
        transports = sum(isinstance(each, Transport) for each in gc.get_objects())
        files, threads = (len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task"))
        keys = [each.num_keys() for each in (*own_stores, store)]
        return [transports, files, threads, *keys]

    form(1)
    form(2)
    before = kept()
    for epoch in range(3, 103):
        form(epoch)
    deadline = time.monotonic() + HANG_S
    while any(now > then for now, then in zip(kept(), before, strict=True)):
        assert time.monotonic() < deadline, (kept(), before)
        time.sleep(0.05)
    for mesh in meshes:
        mesh.close()


def _process(rank: int, port: int, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    mesh = Mesh.build(ParallelConfig(pipeline=2), rank, store, epoch=3, timeout_s=HANG_S)
    t = torch.arange(4.0)
    if mesh.is_first_stage:
        mesh.pipeline.send(t, 1).wait()
    else:
        t = mesh.pipeline.recv(torch.empty(4), 0)
    total = mesh.pipeline.all_reduce(torch.ones(1)).item()
    results.put((rank, t.tolist(), total))
    mesh.close()


def test_two_processes_over_tcp() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=_process, args=(r, server.port, results), daemon=True)
        for r in range(2)
    ]
    for worker in workers:
        worker.start()
    got = sorted(results.get(timeout=HANG_S) for _ in workers)
    for worker in workers:
        worker.join(HANG_S)
        assert worker.exitcode == 0
    assert got == [(0, [0, 1, 2, 3], 2), (1, [0, 1, 2, 3], 2)]


def test_a_dry_run_needs_no_peers_and_returns_defined_values() -> None:
    """A dry run needs no peers and returns no garbage: properties that are measured with a model's
    first tokens must not depend on old memory contents."""
    group = Mesh.build(ParallelConfig(tensor=2), 0).tensor
    own = torch.arange(4.0).view(2, 2)
    with group.dry_run():
        assert group.all_reduce(own.clone()).tolist() == own.tolist()
        assert group.all_gather(own, 0).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
        assert group.all_gather(own, 1).tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]]
        assert group.reduce_scatter(own).tolist() == [[0, 1]]
    with pytest.raises(GroupError):
        group.all_gather(own, 0)
