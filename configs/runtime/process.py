"""Sets up a process before torch is imported, reports the cores and the memory that it may use, and
exits it when one of its loops fails."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from swell.configs.runtime.cgroups import ROOT, cpu_quota, memory_limit
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.promised_memory import promised_bytes

LOOP_FAILED_EXIT_CODE = 70
"""Exit status of a process in which a loop failed (`EX_SOFTWARE`)."""


def prepare_for_torch() -> None:
    """Sets environment variables that torch and OpenMP read when they are loaded. Values that the
    user has set are kept.

    OpenMP threads should sleep at barriers after a very short spin. A step has many barriers. If
    threads only spin, a thread that lost its core to another process (an ingress, another engine)
    costs its peers a scheduling quantum at each barrier: measured on two cores with a little other
    load, a step of 8 rows took 230 ms with spinning and 4 ms with sleeping. But waking a thread
    takes 20-40 us, more than a small matrix product, so threads spin for 1000 of libgomp's
    iterations first. A few hundred iterations already cover the gap between two products.

    Large tensors should use huge pages if the system provides them on request (madvise): a step
    reads all weights, and each page costs a TLB lookup.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def available_cores(root: Path = ROOT) -> int:
    """Returns the cores that this process may use: those of its CPU affinity, limited by the quota
    of its control groups. A quota is rounded down: a process that exceeds its quota is suspended
    until the period ends, and its heartbeats stop. `root` is the folder that stands for `/`."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota.cores)))


def available_memory_bytes(root: Path = ROOT) -> int:
    """Returns the memory that can be allocated without swapping (MemAvailable), limited by what
    this process's control groups leave, without what other workers will still write. Raises
    RuntimeError if the kernel does not report it."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            limit = memory_limit(root)
            promised = promised_bytes(root)
            free -= promised.of_all
            if limit is not None:
                free = min(free, limit.available_bytes - promised.of_group)
            return max(0, free)
    raise RuntimeError("/proc/meminfo has no MemAvailable; set cache.memory_bytes")


def allow_many_files() -> None:
    """Raises the limit of open file descriptors to the hard limit: an ingress needs four for each
    engine and one for each client."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def freeze_gc() -> None:
    """Excludes all existing objects from garbage collection. Imported and loaded objects live as
    long as the process, and each full collection that visits them would delay every stream."""
    gc.collect()
    gc.freeze()


def exit_process(loop: str, error: BaseException) -> None:
    """Exits at once: without this loop the process would only seem alive. Ray, the engine or the
    manager starts a replacement, and other processes continue the requests."""
    what = f"the loop {loop!r} failed, so this process exits"
    try:
        StructuredLogger("process").exception(
            what, error, pid=os.getpid(), status=LOOP_FAILED_EXIT_CODE
        )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also if standard output is closed or nobody reads it
        os._exit(LOOP_FAILED_EXIT_CODE)


def exit_on_error(run: Callable[[], None], loop: str) -> Callable[[], None]:
    """Wraps `run` for a thread that the process needs: an exception in it exits the process."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            exit_process(loop, error)

    return guarded


async def exit_on_error_async(work: Callable[[], Awaitable[None]], loop: str) -> None:
    """Awaits `work`, and ends this process if it raises. Cancelling it is not a failure."""
    try:
        await work()
    except Exception as error:
        exit_process(loop, error)
