"""How a process of ours is set up, before torch is loaded and when it begins to serve, and how it
ends where it must not go on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Awaitable, Callable

from swell.configs.log import StructuredLogger

LOOP_FAILED_EXIT_CODE = 70
"""Exit status of a process whose loop has ended (`EX_SOFTWARE`)."""


def prepare_for_torch() -> None:
    """Set what torch and OpenMP read once, when they are loaded; a value of the user's stays.

    OpenMP's threads are to sleep where they wait for each other, after a very short spin. A step
    passes many barriers. With endless spinning, one thread that lost its core to any other
    process (an ingress, another engine) costs its peers a scheduling quantum at each of them:
    measured on two cores with a little other load, a step of 8 rows took 230 ms spinning and 4 ms
    sleeping. But to wake a thread costs 20-40 us, more than a small product takes; so they spin
    1000 of libgomp's turns first, a few hundred of which already bridge the gap between two
    products.

    Large tensors are to lie in huge pages, where the system gives them to who asks: a step passes
    over all weights, and each page is looked up anew.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def freeze_gc() -> None:
    """Let the garbage collector pass over all that exists: what was imported and loaded stays as
    long as the process, and to look through it again would hold up every stream."""
    gc.collect()
    gc.freeze()


def exit_process(loop: str, error: BaseException) -> None:
    """End this process at once: it would only look alive. Ray starts another one, or its engine or
    manager does. What the others wait for from it, they continue elsewhere."""
    what = f"the loop {loop!r} has ended, and this process with it"
    try:
        StructuredLogger("process").exception(
            what, error, pid=os.getpid(), status=LOOP_FAILED_EXIT_CODE
        )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where standard output is closed, or its reader has gone
        os._exit(LOOP_FAILED_EXIT_CODE)


def exit_on_error(run: Callable[[], None], loop: str) -> Callable[[], None]:
    """`run` for a thread that its process cannot do without: what it raises ends the process."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            exit_process(loop, error)

    return guarded


async def exit_on_error_async(work: Callable[[], Awaitable[None]], loop: str) -> None:
    """The same for a task; to cancel it is no failure."""
    try:
        await work()
    except Exception as error:
        exit_process(loop, error)
