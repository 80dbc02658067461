"""Parallel loops: every task is done once with any number of helper threads, and helpers
terminate."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.kernels.load import load_backend
from tests.support.deadlines import HANG_S
from tests.worker.comm.test_mesh import in_threads

pytestmark = pytest.mark.slow

ROWS, SIZE, OUTS = 16, 256, 512


def threads_of_process() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def until_gone(threads: set[str]) -> bool:
    deadline = time.monotonic() + HANG_S
    while threads & threads_of_process():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def products(threads: int, repeats: int, pause_s: float = 0.0) -> set[bytes]:
    """Returns the distinct results of one product; each result overwrites memory that held other
    values."""
    linear = load_backend("cpu", "linear")
    torch.set_num_threads(1)  # torch's own operations below use threads of their own
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, SIZE, generator=generator)
    weight = linear.pack(torch.randn(OUTS, SIZE, generator=generator))
    torch.set_num_threads(threads)
    found = set()
    for _ in range(repeats):
        found.add(linear.linear(x, weight).numpy().tobytes())
        time.sleep(pause_s)
    return found


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_a_result_does_not_depend_on_the_number_of_helpers(threads):
    """The result is the same with awake helpers, with sleeping ones, and with more of them than
    cores."""
    alone = in_threads(1, lambda rank: products(1, 1))[0]
    busy = in_threads(1, lambda rank: products(threads, 2000))[0]
    slow = in_threads(1, lambda rank: products(threads, 100, 0.001))[0]
    assert alone == busy == slow and len(alone) == 1


def test_threads_of_one_process_have_teams_of_their_own():
    results = in_threads(4, lambda rank: products(2 + rank % 2, 500))
    assert len(set.union(*results)) == 1


def test_helpers_leave_with_the_thread_that_they_helped():
    before = threads_of_process()
    seen: set[str] = set()

    def work() -> None:
        products(4, 50)
        seen.update(threads_of_process() - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 4  # the thread and its three helpers
    assert until_gone(seen)


def test_a_different_number_of_threads_uses_another_team():
    def work(rank: int) -> bool:
        products(8, 50)
        first = threads_of_process() - before - {str(threading.get_native_id())}
        assert len(first) == 7
        products(2, 50)
        return until_gone(first)

    before = threads_of_process()
    assert in_threads(1, work) == [True]


def test_a_forked_process_works_without_helpers():
    linear = load_backend("cpu", "linear")
    torch.set_num_threads(2)
    x, weight = torch.ones(ROWS, SIZE), linear.pack(torch.ones(OUTS, SIZE))
    assert (linear.linear(x, weight) == SIZE).all()
    child = os.fork()
    if child == 0:
        right = linear.linear(x, weight).numpy() == SIZE
        os._exit(0 if right.all() else 1)
    assert os.waitpid(child, 0)[1] == 0
