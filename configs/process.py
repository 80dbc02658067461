"""Setup of a process, before torch is imported and before it serves; the cores and the memory that
it may use; and how it exits when one of its loops fails."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from swell.configs.cgroups import ROOT, cpu_quota, memory_limit
from swell.configs.log import StructuredLogger

LOOP_FAILED_EXIT_CODE = 70
"""Exit status of a process in which a loop failed (`EX_SOFTWARE`)."""


def prepare_for_torch() -> None:
    """Set environment variables that torch and OpenMP read when they are loaded; values that the
    user has set are kept.

    OpenMP's threads shall sleep at barriers, after a very short spin. A step has many barriers. If
    threads only spin, a thread that lost its core to another process (an ingress, another engine)
    costs its peers a scheduling quantum at each barrier: measured on two cores with a little other
    load, a step of 8 rows took 230 ms spinning and 4 ms sleeping. But waking a thread takes
    20-40 us, more than a small product; so they spin for 1000 of libgomp's turns first. A few
    hundred turns already cover the gap between two products.

    Large tensors shall use huge pages, where the system has them on request (madvise): a step reads
    all weights, and each page costs a lookup.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def available_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: those of its affinity, and no more than the quota of its
    control groups. A quota is rounded down: a process that exceeds it stands still, with its
    heartbeats, until the period ends. `root`: the folder that stands for `/`."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota.cores)))


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that can be allocated without swapping (MemAvailable), and no more than the limits of
    this process's control groups leave. Raises RuntimeError if the kernel does not say."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            limit = memory_limit(root)
            return free if limit is None else min(free, limit.available_bytes)
    raise RuntimeError("/proc/meminfo has no MemAvailable; set cache.memory_bytes")


def allow_many_files() -> None:
    """Use as many file descriptors as the system lets this process have: an ingress has four for
    each engine, and one for each client."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection: imported and loaded objects exist as
    long as the process, and each full collection of it would delay every stream."""
    gc.collect()
    gc.freeze()


def exit_process(loop: str, error: BaseException) -> None:
    """Exit at once: without this loop the process would only seem alive. Ray, the engine or the
    manager starts a replacement; requests of this process are continued elsewhere."""
    what = f"the loop {loop!r} has ended, and this process with it"
    try:
        StructuredLogger("process").exception(
            what, error, pid=os.getpid(), status=LOOP_FAILED_EXIT_CODE
        )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also if standard output is closed or has no reader
        os._exit(LOOP_FAILED_EXIT_CODE)


def exit_on_error(run: Callable[[], None], loop: str) -> Callable[[], None]:
    """`run`, for a thread that the process needs: an exception in it ends the process."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            exit_process(loop, error)

    return guarded


async def exit_on_error_async(work: Callable[[], Awaitable[None]], loop: str) -> None:
    """The same for a task; cancelling it is no failure."""
    try:
        await work()
    except Exception as error:
        exit_process(loop, error)
