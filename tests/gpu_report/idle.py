"""The idle share of the device: the part of the time of decode steps without work for the device.

On a GPU the time of a step is that between the ends of two steps, by events in the stream. The time
that the device itself needs is measured in the same way after a long wait that is queued before a
step: until the wait ends, the host has queued the next step, too, so that the host does not delay
it. The gaps between the kernels of a graph count as work.

On a CPU the device is the processor that computes the steps, and the rest of the time is that of
the scheduler and of the outputs: the figure shows only that the command works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from tests.gpu_report.engines import Swell
from tests.gpu_report.scale import Scale

_WAIT_CYCLES = 100_000_000
"""The wait of the stream: about 50 ms."""
_STEPS_BETWEEN_WAITS = 8


class _Step:
    """When a step began and ended on the device."""

    def __init__(self, scale: Scale) -> None:
        self._is_gpu = scale.is_full
        self._begin, self._end = self._mark(), None

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ended(self) -> None:
        self._end = self._mark()

    def seconds_until(self, other: _Step) -> float:
        """Returns the time between the ends of two steps."""
        return self._between(self._end, other._end)

    @property
    def seconds(self) -> float:
        """The time from its beginning to its end."""
        return self._between(self._begin, self._end)

    def _between(self, begin: Any, end: Any) -> float:
        seconds: float = begin.elapsed_time(end) / 1e3 if self._is_gpu else end - begin
        return seconds


def idle_share(scale: Scale, engine: Swell, prompts: list[list[int]], steps: int) -> float:
    """Returns the share for `steps` decode steps of these rows."""
    usual = _decode_steps(scale, engine, prompts, steps, waits=False)
    step_s = usual[0].seconds_until(usual[-1]) / (len(usual) - 1)
    if scale.is_full:
        late = _decode_steps(scale, engine, prompts, steps, waits=True)
        device_s = median(_after_waits(late))
    else:
        device_s = median(step.seconds for step in usual)
    return round(max(0.0, 1 - device_s / step_s), 4)


def _after_waits(steps: list[_Step]) -> Iterator[float]:
    """Yields the time of each step that was queued while the stream waited before the one before
    it."""
    for index in range(_STEPS_BETWEEN_WAITS, len(steps) - 1, _STEPS_BETWEEN_WAITS):
        yield steps[index].seconds_until(steps[index + 1])


def _decode_steps(
    scale: Scale, engine: Swell, prompts: list[list[int]], count: int, waits: bool
) -> list[_Step]:
    """Generates, and returns the decode steps of all rows."""
    steps: list[_Step] = []
    executor = engine.core.executor
    execute = executor.execute

    def measured(plan: Any) -> Any:
        is_decode = plan.num_tokens == [1] * len(prompts) and not plan.new_requests
        is_late = waits and is_decode and steps and len(steps) % _STEPS_BETWEEN_WAITS == 0
        if is_late:
            torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[attr-defined]
        step = _Step(scale)
        output = execute(plan)
        step.ended()
        if is_decode:
            steps.append(step)
        return output

    executor.execute = measured  # type: ignore[method-assign]
    try:
        engine.generate(prompts, count + 1)
    finally:
        executor.execute = execute  # type: ignore[method-assign]
    scale.synchronize()
    return steps
