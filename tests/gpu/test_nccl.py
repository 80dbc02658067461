"""NCCL on real cards: groups are formed and aborted many times, and a peer is killed or stopped
inside a collective."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swell.configs.schema import ParallelConfig
from swell.worker.comm.connect import connect
from swell.worker.comm.group_secret import GroupSecret
from swell.worker.comm.groups import GroupError
from swell.worker.comm.mesh import Mesh
from swell.worker.wire import GroupPlan

CARDS = torch.cuda.device_count()
GROUP_S = 60.0
LIMIT_S = 240.0
FORMED = 100
LEAKED_BYTES = 64 << 20
"""Memory that a hundred groups may keep together, besides that of the first ones."""

pytestmark = pytest.mark.gpu


def form_and_abort(number: int) -> None:
    secret = GroupSecret(b"secret", f"generation{number}/alone")
    store, aborted = dist.HashStore(), threading.Event()
    transport = connect("cuda:0", store, 0, 1, GROUP_S, aborted, secret)
    ones = torch.ones(1, device="cuda:0")
    transport.wait_on_host(transport.backend.allreduce([ones]))
    assert ones.item() == 1
    assert not transport.poll()
    if number % 2:
        transport.abort()
    transport.close()


@pytest.mark.skipif(CARDS < 1, reason="needs a CUDA GPU")
def test_groups_of_one_rank_are_formed_and_aborted_a_hundred_times() -> None:
    def held() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        free, _total = torch.cuda.mem_get_info(0)
        return -free, len(os.listdir("/proc/self/fd")), threading.active_count()

    for number in range(4):
        form_and_abort(number)
    memory, files, threads = held()
    for number in range(4, 4 + FORMED):
        form_and_abort(number)
    memory_after, files_after, threads_after = held()
    assert memory_after - memory < LEAKED_BYTES
    assert files_after <= files + 2 and threads_after <= threads


def _store(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _join(kind: str, rank: int, port: int, generation: int) -> Mesh:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return Mesh.build(
        ParallelConfig(tensor=2), rank, _store(port), generation, device, timeout_s=GROUP_S
    )


def _reduce(mesh: Mesh) -> float:
    """Returns a sum over both ranks, like a step that reads its result on the host."""
    total = mesh.tensor.all_reduce(torch.ones(1 << 20, device=mesh.device))[0].item()
    mesh.check()
    return float(total)


def _victim(kind: str, port: int) -> None:
    mesh = _join(kind, 1, port, 1)
    while True:
        _reduce(mesh)


def _survivor(kind: str, port: int, stepped: Any, lost: Any, results: Any) -> None:
    """Computes until the peer is lost. Like in a worker, another thread aborts the groups when the
    engine has noticed the loss; then the process forms its groups again."""
    mesh = _join(kind, 0, port, 1)

    def abort() -> None:
        lost.wait()
        mesh.abort(1)

    threading.Thread(target=abort, daemon=True).start()
    try:
        while True:
            _reduce(mesh)
            stepped.set()
    except GroupError:
        mesh.begin(2)
        mesh.regroup(GroupPlan(2), _store(port), None, GROUP_S)
        results.put(_reduce(mesh))
        mesh.close()


def _replacement(kind: str, port: int) -> None:
    mesh = _join(kind, 1, port, 2)
    _reduce(mesh)
    mesh.close()


def lose_a_peer(kind: str, number: signal.Signals) -> float:
    """Returns the sum that the survivor and the replacement of a lost peer compute."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    stepped, lost, results = spawn.Event(), spawn.Event(), spawn.Queue()
    survivor = spawn.Process(
        target=_survivor, args=(kind, server.port, stepped, lost, results), daemon=True
    )
    victim, replacement = (
        spawn.Process(target=run, args=(kind, server.port), daemon=True)
        for run in (_victim, _replacement)
    )
    survivor.start()
    victim.start()
    try:
        assert stepped.wait(LIMIT_S)
        assert victim.pid is not None
        os.kill(victim.pid, number)
        lost.set()
        replacement.start()
        total: float = results.get(timeout=LIMIT_S)
        survivor.join(LIMIT_S)
        assert survivor.exitcode == 0
        return total
    finally:
        for process in (victim, survivor, replacement):
            if process.pid is not None:
                process.kill()
                process.join()


@pytest.mark.skipif(CARDS < 2, reason="needs two CUDA GPUs: NCCL refuses two ranks on one")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_worker_survives_the_loss_of_a_peer_inside_a_collective(number: signal.Signals) -> None:
    assert lose_a_peer("cuda", number) == 2
