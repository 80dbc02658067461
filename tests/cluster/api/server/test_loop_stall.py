"""No hostile request blocks the others: measures the loop of the ingress while it serves hostile
requests.

The requirement is 50 ms on a quiet machine. The bound here is wider because load makes every
instruction slower. A longer stall is compared with a fixed piece of work that runs right after it,
at the speed that the machine has then. `pytest -s` prints the time of each request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.api.bodies import adversarial_bodies as hostile
from tests.cluster.api.server.loop_stall import (
    TICK_S,
    Instant,
    LoopStallMonitor,
    stall_harness,
    stall_s,
)
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

LEAST_BOUND_S = 0.25
WORK = b"[" + b"1," * (1 << 20) + b"1]"
BOUND_WORKS = 6
"""The bound as a multiple of the processor time in which `json` reads WORK."""
ATTEMPTS = 3
"""A request that blocks the loop does so each time it is sent. Other causes of a stall, such as
other threads of this process, do not return with it."""
KINDS = (
    hostile.heads,
    hostile.at_every_route,
    hostile.just_within,
    hostile.conversations,
    hostile.tools,
    hostile.forms,
    hostile.sampling_fields,
    hostile.accepted,
    hostile.histories,
    hostile.packed,
    pytest.param(hostile.just_within_at_every_route, marks=pytest.mark.slow_variants),
)


def bound_s() -> float:
    """Returns the longest allowed stall at the current speed of the machine."""
    start_s = time.thread_time()
    json.loads(WORK)
    return max(LEAST_BOUND_S, BOUND_WORKS * (time.thread_time() - start_s))


async def stalls_of(
    kind: Callable[[], Iterator[tuple[str, bytes]]], folder: Path, script: list[int] | None
) -> list[str]:
    """Returns the requests that stall the loop each time they are sent, with their times."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    stalls = []
    async with stall_harness(folder, script, **{"serve.tool_parser": "hermes"}) as place:
        for name, request in kind():
            attempts = []
            for _ in range(ATTEMPTS):
                gap_s, status, start = await place.longest_stall(request)
                print(f"{gap_s * 1000:6.0f} ms  {status}  {name}")
                assert status < 500, f"{name}: {start!r}"
                assert script is None or status == 200, f"{name}: {start!r}"
                if gap_s <= LEAST_BOUND_S or gap_s <= (limit_s := bound_s()):
                    break
                attempts.append(f"{gap_s:.3f} of {limit_s:.3f} s")
            else:
                stalls.append(f"{name}: {', '.join(attempts)}")
        answer = await place.cluster.client.get("/health")
        assert answer.status_code == 200
    return stalls


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_request_stalls_the_loop(
    tmp_path: Path, kind: Callable[[], Iterator[tuple[str, bytes]]]
) -> None:
    assert asyncio.run(stalls_of(kind, tmp_path, None)) == []


def test_no_answer_stalls_the_loop(tmp_path: Path) -> None:
    assert asyncio.run(stalls_of(hostile.long_answers, tmp_path, [7] * 10)) == []


@pytest.mark.parametrize(
    ("late", "expected_s"),
    [
        (Instant(3.0, 8.0, 0.0), 2.0),
        (Instant(3.0, 6.5, 1.5), 0.5),
        (Instant(3.0, 6.5, 0.0), 0.5),
        (Instant(3.0, 8.0, 1.75), 0.25),
    ],
    ids=[
        "the loop computes",
        "other processes have the cores",
        "a thread with the GIL waits for a core",
        "another thread of this process has the core",
    ],
)
def test_a_stall_is_the_time_in_which_the_loop_is_blocked(late: Instant, expected_s: float) -> None:
    assert stall_s(Instant(1.0, 6.0, 0.0), late) == expected_s


def test_a_stall_is_noticed() -> None:
    """Blocks a loop for twice the least bound."""

    async def blocked() -> float:
        monitor = LoopStallMonitor()
        ticking = asyncio.create_task(monitor.run())
        await asyncio.sleep(5 * TICK_S)
        start_s = time.thread_time()
        while time.thread_time() < start_s + 2 * LEAST_BOUND_S:
            json.loads(WORK)
        await asyncio.sleep(5 * TICK_S)
        ticking.cancel()
        return monitor.longest_s

    assert asyncio.run(blocked()) > LEAST_BOUND_S
