"""No hostile request blocks the others: measures the loop of the ingress while it serves hostile
requests.

The requirement is 50 ms. The bound here is wider because the machine has other load. On a slower
machine it is wider still: it grows with the time of a fixed piece of work. `pytest -s` prints the
time of each request.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.api.bodies import adversarial_bodies as hostile
from tests.cluster.api.server.loop_stall import stall_harness
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

LEAST_BOUND_S = 0.25
WORK = b"[" + b"1," * (1 << 20) + b"1]"
BOUND_WORKS = 6
"""The bound as a multiple of the time in which `json` reads WORK."""
ATTEMPTS = 3
"""A request that blocks the loop does so each time it is sent. Other causes of a gap, such as other
threads of this process, do not return with it: the shortest gap counts."""
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


@pytest.fixture(scope="module")
def bound_s() -> float:
    def work_s() -> float:
        start_s = time.process_time()
        json.loads(WORK)
        return time.process_time() - start_s

    return max(LEAST_BOUND_S, BOUND_WORKS * min(work_s() for _ in range(3)))


async def gaps_of(
    kind: Callable[[], Iterator[tuple[str, bytes]]],
    folder: Path,
    script: list[int] | None,
    bound_s: float,
) -> dict[str, float]:
    """Returns the gap of each request. Sends a request again if its gap is above `bound_s`."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    gaps = {}
    async with stall_harness(folder, script, **{"serve.tool_parser": "hermes"}) as place:
        for name, request in kind():
            gaps[name] = math.inf
            for _ in range(ATTEMPTS):
                gap_s, status, start = await place.longest_stall(request)
                print(f"{gap_s * 1000:6.0f} ms  {status}  {name}")
                assert status < 500, f"{name}: {start!r}"
                assert script is None or status == 200, f"{name}: {start!r}"
                gaps[name] = min(gaps[name], gap_s)
                if gap_s <= bound_s:
                    break
        answer = await place.cluster.client.get("/health")
        assert answer.status_code == 200
    return gaps


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_request_stalls_the_loop(
    tmp_path: Path, kind: Callable[[], Iterator[tuple[str, bytes]]], bound_s: float
) -> None:
    gaps = asyncio.run(gaps_of(kind, tmp_path, None, bound_s))
    assert {name: gap for name, gap in gaps.items() if gap > bound_s} == {}


def test_no_answer_stalls_the_loop(tmp_path: Path, bound_s: float) -> None:
    gaps = asyncio.run(gaps_of(hostile.long_answers, tmp_path, [7] * 10, bound_s))
    assert {name: gap for name, gap in gaps.items() if gap > bound_s} == {}
