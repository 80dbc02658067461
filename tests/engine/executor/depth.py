"""Steps in flight on a CPU. There the executor of a single worker computes a step before it
returns, so it ignores `scheduler.steps_in_flight`. The executor with a thread for each worker
respects it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from swell.engine.core import EngineCore
from swell.engine.executor import EXECUTORS
from swell.worker.wire import AsyncModelRunnerOutput, SchedulerOutput


@contextmanager
def keeping_depth() -> Iterator[None]:
    """Executors that are built inside the context respect the depth, also with one worker."""
    with patch.dict(EXECUTORS, {"inline": EXECUTORS["inproc"]}):
        yield


def record_depth(core: EngineCore) -> list[int]:
    """Records the number of steps in flight when each step is submitted, including that step."""
    depths: list[int] = []
    execute = core.executor.execute

    def recording(plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        depths.append(core.wave_member.in_flight)
        return execute(plan)

    core.executor.execute = recording  # type: ignore[method-assign]
    return depths
