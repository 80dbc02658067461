"""Runs slow work off the event loop.

Invariant: no request blocks others. Work for a request of some kilobytes runs on the event loop:
passing it to a thread would cost more. All other work runs in a few threads: only a few, because
each thread that computes in Python makes the loop wait for one more turn at the interpreter's lock.
A thread helps only if its work releases the lock now and then, so a single call must never be long:
this is what the limits of bodies (`cluster/text/schema/json_size.py`) are for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 8 * 1024
"""Size of a body that takes at most some milliseconds to read, check and tokenize."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread may compute before the loop gets its turn. Python's default is five times as
long, and the loop needs a turn for every batch of tokens."""


class OffloadPool:
    """Runs work in at most `threads` threads; other work waits in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    async def run(self, work: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(work, *args))

    async def run_sized(self, size_bytes: int, work: Callable[..., T], *args: object) -> T:
        """Runs `work`, in a thread if `size_bytes` is large: the size of the body, or of the data
        that the work reads."""
        if size_bytes <= INLINE_BYTES:
            return work(*args)
        return await self.run(work, *args)

    def close(self) -> None:
        """Drops work that waits; work that has begun finishes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class OffloadPools:
    """One pool for each kind of work. Grammars wait for the one process that checks them, and
    bodies for their tokenizer: other work must not wait for these."""

    def __init__(self) -> None:
        self.bodies = OffloadPool("bodies", 3)
        self.grammars = OffloadPool("grammars", 2)
        self.answers = OffloadPool("answers", 2)

    def close(self) -> None:
        self.bodies.close()
        self.grammars.close()
        self.answers.close()
