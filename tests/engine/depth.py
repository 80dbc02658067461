"""Steps in flight on a CPU: the executor of a single worker there computes a step before it
returns, so it ignores `scheduler.steps_in_flight`. The one with a thread for each worker keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from swell.engine.core import EngineCore
from swell.engine.executor import EXECUTORS
from swell.worker.wire import AsyncModelRunnerOutput, SchedulerOutput


@contextmanager
def keeping_depth() -> Iterator[None]:
    """Executors that are built inside the context keep the depth, also with one worker."""
    with patch.dict(EXECUTORS, {"inline": EXECUTORS["inproc"]}):
        yield


def record_depth(core: EngineCore) -> list[int]:
    """Steps in flight as each step is submitted, that one included."""
    depths: list[int] = []
    execute = core.executor.execute

    def recording(plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        depths.append(core.wave_member.in_flight)
        return execute(plan)

    core.executor.execute = recording  # type: ignore[method-assign]
    return depths
