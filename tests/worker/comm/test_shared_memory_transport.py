"""Groups through shared memory: sums and parts of any size, lost peers, and when gloo is used."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swell.configs.schema import ParallelConfig
from swell.kernels.backends import BackendUnavailable
from swell.kernels.cpu import exchange
from swell.worker.comm import shared_memory_transport
from swell.worker.comm.gloo_transport import GlooTransport
from swell.worker.comm.mesh import GroupError, Mesh
from swell.worker.comm.shared_memory_transport import SharedMemoryTransport
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker.comm.test_mesh import in_threads

pytestmark = pytest.mark.slow


def transport_of(mesh: Mesh) -> Any:
    group: Any = mesh.tensor
    return group._transport


def build(ranks: int, rank: int, store: Any) -> Mesh:
    mesh = Mesh.build(ParallelConfig(tensor=ranks), rank, store, timeout_s=HANG_S)
    assert isinstance(transport_of(mesh), SharedMemoryTransport)
    return mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_parts_are_exchanged_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: torch.dtype
) -> None:
    """Tensors are smaller than a slot, equal to it, and longer, with and without a rest; steps that
    follow each other at once use both slots."""
    monkeypatch.setattr(exchange, "SLOT_BYTES", 192)
    store, sizes = dist.HashStore(), (1, 7, 24, 48, 96, 97, 200, 1001)

    def values(rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank * 10_000 + size)
        return (torch.randn(size, generator=generator) * 9).to(dtype)

    def work(rank: int) -> None:
        mesh = build(ranks, rank, store)
        for size in sizes * 3:
            terms = [values(peer, size) for peer in range(ranks)]
            total = terms[0].to(torch.float32 if dtype.is_floating_point else dtype, copy=True)
            for term in terms[1:]:
                total += term
            own = values(rank, size)
            assert torch.equal(mesh.tensor.all_reduce_in_order(own), total.to(dtype))
            got = mesh.tensor.all_gather(values(rank, size).view(1, -1), 1)
            assert torch.equal(got, torch.cat(terms)[None])
        mesh.close()

    in_threads(ranks, work)


def test_rows_of_all_ranks_are_put_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may end within a row."""
    monkeypatch.setattr(exchange, "SLOT_BYTES", 20)
    store, rows = dist.HashStore(), 5
    parts = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def work(rank: int) -> torch.Tensor:
        mesh = build(3, rank, store)
        out = torch.empty(rows, 9)
        transport_of(mesh)._exchange.all_gather(parts[rank], out, rows)
        mesh.tensor.check()
        mesh.close()
        return out

    for out in in_threads(3, work):
        assert torch.equal(out, torch.cat(parts, 1))


def _process(rank: int, port: int, results: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    mesh = build(2, rank, store)
    for step in range(2000):
        total = mesh.tensor.all_reduce(torch.full((300,), float(rank + step)))
        assert total.eq(2 * step + 1).all()
    results.send("summed")
    try:
        while True:
            mesh.tensor.all_reduce(torch.ones(1))
    except GroupError as error:
        results.send(str(error))


@pytest.mark.parametrize("lost", [0, 1])
def test_the_death_of_a_process_ends_the_operations_of_its_peers(lost: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    workers = [
        spawn.Process(target=_process, args=(rank, server.port, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for results, _ in pipes:
        assert results.poll(HANG_S) and results.recv() == "summed"
    workers[lost].kill()
    results, _ = pipes[1 - lost]
    assert results.poll(HANG_S) and f"rank {lost} has ended" in results.recv()
    workers[1 - lost].join(HANG_S)
    assert workers[1 - lost].exitcode == 0


def test_a_rank_that_does_not_arrive_is_named_after_the_time_limit() -> None:
    store, done = dist.HashStore(), threading.Event()

    def work(rank: int) -> None:
        mesh = build(3, rank, store)
        transport_of(mesh)._exchange.set_timeout(0.5)
        if rank == 1:
            done.wait(HANG_S)
            return
        try:
            with pytest.raises(GroupError, match=r"rank 1 did not arrive in 0\.5 s"):
                mesh.tensor.all_reduce(torch.ones(3))
            with pytest.raises(GroupError, match="aborted"):
                mesh.tensor.all_reduce(torch.ones(3))
        finally:
            done.set()

    in_threads(3, work)


def test_a_slow_peer_is_waited_for() -> None:
    """A peer that arrives when the others sleep wakes them."""
    store = dist.HashStore()

    def work(rank: int) -> list[float]:
        mesh, totals = build(2, rank, store), []
        for step in range(4):
            if step % 2 == rank:
                time.sleep(0.2)
            totals.append(mesh.tensor.all_reduce(torch.full((2,), 1.0 + step))[1].item())
        mesh.close()
        return totals

    assert in_threads(2, work) == [[2, 4, 6, 8]] * 2


@pytest.mark.parametrize(
    "reason", ["another machine", "no compiler", "a file that cannot be opened"]
)
def test_all_ranks_use_gloo_if_one_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    store = dist.HashStore()
    machine, mapped = shared_memory_transport._machine, shared_memory_transport._mapped

    def is_second() -> bool:
        return threading.current_thread().name == "second"

    def other_machine() -> str:
        if is_second() and reason == "no compiler":
            raise BackendUnavailable("no compiler")
        return "elsewhere" if is_second() and reason == "another machine" else machine()

    def not_opened(place: Any, size: int) -> Any:
        return None if is_second() and "opened" in reason else mapped(place, size)

    monkeypatch.setattr(shared_memory_transport, "_machine", other_machine)
    monkeypatch.setattr(shared_memory_transport, "_mapped", not_opened)

    def work(rank: int) -> float:
        if rank == 1:
            threading.current_thread().name = "second"
        mesh = Mesh.build(ParallelConfig(tensor=2), rank, store, timeout_s=HANG_S)
        assert isinstance(transport_of(mesh), GlooTransport)
        total = mesh.tensor.all_reduce(torch.ones(1)).item()
        mesh.close()
        return total

    assert in_threads(2, work) == [2, 2]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_abort_ends_the_forming_of_a_group(
    monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    """Rank 1 stops after it has opened the memory, and rank 0 waits for its token; or rank 0 is
    aborted before it looks for what rank 1 has published."""
    monkeypatch.setattr(shared_memory_transport, "CONNECT_S", 120.0)
    real, mapped = shared_memory_transport.check_members, shared_memory_transport._mapped
    store, done = dist.HashStore(), threading.Event()
    meshes = [Mesh.build(ParallelConfig(tensor=2), rank) for rank in range(2)]

    def stop_at_rank_1(transport: Any, formation: Any) -> None:
        if formation.rank == 0:
            threading.Timer(0.1, meshes[0].abort).start()
            real(transport, formation)
        done.wait(HANG_S)
        raise RuntimeError("stopped")

    def aborted_late(place: Any, size: int) -> Any:
        region = mapped(place, size)
        if threading.current_thread().name == "late":
            time.sleep(0.3)
            meshes[0].abort()
        return region

    monkeypatch.setattr(shared_memory_transport, "check_members", stop_at_rank_1)
    if not is_waiting:
        monkeypatch.setattr(shared_memory_transport, "_mapped", aborted_late)

    def work(rank: int) -> float:
        if rank == 0 and not is_waiting:
            threading.current_thread().name = "late"
        meshes[rank].begin(1)
        before = time.monotonic()
        with pytest.raises(GroupError):
            meshes[rank].regroup(GroupPlan(1), store, None, 60)
        if rank == 0:
            done.set()
        return time.monotonic() - before

    took, _ = in_threads(2, work)
    assert took < 50, "it has waited for the time limit"
