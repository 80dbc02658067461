"""A model without tensors: a token is a function of the tokens before it and of the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swell.engine.executor import Executor, ExecutorLimits, Progress, WorkerInfo
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
)
from tests.simulator.process import Process

VOCAB_SIZE = 50
NUM_BLOCKS = 256
MAX_MODEL_LEN = 512

_STEP_S = 0.004
_TOKEN_S = 0.0001


def next_token(last: int, position: int, seed: int) -> int:
    return (last * 31 + position * 17 + seed * 7 + (last ^ position) * 5) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], count: int, seed: int) -> list[int]:
    """The outputs of a request by definition."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens), seed))
    return tokens[len(prompt) :]


class SimStep(AsyncModelRunnerOutput):
    """A step that is computed at a time of its process's clock."""

    def __init__(self, executor: SimExecutor, output: ModelRunnerOutput, at: float) -> None:
        self._executor, self._output, self._at = executor, output, at

    async def computed(self) -> None:
        await asyncio.sleep(max(0.0, self._at - self._executor.process.time()))
        while self._executor.hangs:
            await asyncio.sleep(1.0)

    def get_output(self) -> ModelRunnerOutput:
        self._executor.progress += 1
        return self._output


class SimExecutor(Executor):
    """Reads the tokens of its own slots only: what a slot lost is missing in its answers."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.hangs = False
        """Steps do not end, though the process lives."""
        self.progress = 0
        self._rows: dict[int, tuple[dict[int, int], int]] = {}

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        return ExecutorLimits(NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE)

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        for row in plan.new_rows:
            self._rows[row.slot] = (dict(enumerate(row.token_ids)), row.sampler.seed)
        sampled = []
        rows = zip(plan.slots, plan.starts, plan.num_tokens, plan.samples, strict=True)
        for slot, start, count, samples in rows:
            if samples:
                tokens, seed = self._rows[slot]
                end = start + count
                tokens[end] = next_token(tokens[end - 1], end, seed)
                sampled.append(tokens[end])
        at = self.process.time() + _STEP_S + _TOKEN_S * sum(plan.num_tokens)
        return SimStep(self, ModelRunnerOutput(plan.step, sampled), at)

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        self._rows.clear()
        return []

    def abort(self) -> None:
        """No collective of other engines is under way."""

    @property
    def progress_counter(self) -> int:
        return self.progress

    def workers(self) -> list[WorkerInfo]:
        return []

    def shutdown(self) -> None:
        self._rows.clear()


class NumberDetokenizer:
    """The text of a token is its number."""

    table: Any = None
    at_beginning = False
    pending_chars = 0

    def start(self, *_: Any, **__: Any) -> NumberDetokenizer:
        return self

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)
