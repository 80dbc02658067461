"""Work that takes long, off the event loop.

The law: no request keeps others waiting. What a request of some kilobytes needs is done where it
came in: to hand it over would cost more. All else is done by a few threads: few, because each that
computes in Python makes the loop wait for one more turn at the interpreter's lock. A thread helps
only against work that gives the lock up now and then, so a single call must never be long: that is
what the limits of bodies (`cluster/text/schema/json_size.py`) are for.
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
"""To read, check and tokenize so much takes some milliseconds at most."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread may compute before the loop gets its turn; Python's default is five times
that, and the loop needs a turn for every batch of tokens."""


class OffloadPool:
    """`threads` at most are busy; what finds none free waits, in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    async def run(self, work: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(work, *args))

    async def run_sized(self, size_bytes: int, work: Callable[..., T], *args: object) -> T:
        """`size_bytes`: of the body that the work is for, or of what it reads."""
        if size_bytes <= INLINE_BYTES:
            return work(*args)
        return await self.run(work, *args)

    def close(self) -> None:
        """What waits is dropped; what has begun ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class OffloadPools:
    """Grammars wait for the one process that checks them, and bodies for their tokenizer: nothing
    else must wait behind these."""

    def __init__(self) -> None:
        self.bodies = OffloadPool("bodies", 3)
        self.grammars = OffloadPool("grammars", 2)
        self.answers = OffloadPool("answers", 2)

    def close(self) -> None:
        self.bodies.close()
        self.grammars.close()
        self.answers.close()
