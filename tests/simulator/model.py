"""A model without tensors: each token is a function of the previous token, its position, the seed
and the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from swell.engine.executor import (
    Executor,
    ExecutorLimits,
    GroupBroken,
    Progress,
    WorkerInfo,
    WorkerLost,
)
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
)
from tests.simulator.groups import SimGroups, SimMember
from tests.simulator.kernel.process import Process

VOCAB_SIZE = 50
NUM_BLOCKS = 256
MAX_MODEL_LEN = 512
BROKEN_WEIGHTS = 3
"""Weights that engines fail to load."""
POISON_SEED = 99
"""The seed of poison requests: each engine that computes one terminates."""

_TOKEN_S = 0.0001
_REPAIR_S = 3.0
"""The longest time until a lost worker is replaced, or an engine has woken up."""


def folder_of(weights: int) -> str:
    """Returns the model path that a configuration has for these weights."""
    return f"weights-{weights}"


def weights_in(folder: str) -> int:
    return int(folder.removeprefix("weights-"))


def next_token(last: int, position: int, seed: int, weights: int = 0) -> int:
    mixed = last * 31 + position * 17 + seed * 7 + (last ^ position) * 5 + weights * 13
    return mixed % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], count: int, seed: int, weights: int) -> list[int]:
    """Returns the output tokens that a request must get."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens), seed, weights))
    return tokens[len(prompt) :]


class SimStep(AsyncModelRunnerOutput):
    """A step that finishes at a given time of its process's clock."""

    def __init__(self, executor: SimExecutor, output: ModelRunnerOutput, at: float) -> None:
        self._executor, self._output, self._at = executor, output, at

    async def computed(self) -> None:
        executor, process = self._executor, self._executor.process
        await process.sleep(self._at - process.time())
        if executor.hangs:
            await executor.wait_while_hanging()

    def get_output(self) -> ModelRunnerOutput:
        self._executor.check()
        self._executor.progress += 1
        return self._output


class SimGroupStep(AsyncModelRunnerOutput):
    """A step of an engine that shares experts. It starts after the previous step finishes, and
    begins with an all-reduce over the group."""

    def __init__(
        self, executor: SimExecutor, plan: SchedulerOutput, sampled: list[int], time_s: float
    ) -> None:
        self._executor, self._plan, self._sampled = executor, plan, sampled
        self._time_s = time_s
        self._before = executor.last_step
        member = executor.member
        assert member is not None, "a step without a group"
        self._member = member
        self._result: ModelRunnerOutput | None = None
        self._error: GroupBroken | None = None
        self._task = executor.process.loop.create_task(self._compute(), name="step")

    async def _compute(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            await before.computed()
        try:
            sums = await self._member.all_reduce(self._plan.work, self._plan.pause)
            await self._executor.process.sleep(self._time_s)
            if self._executor.hangs:
                await self._executor.wait_while_hanging()
            if self._member.broken is not None:
                raise GroupBroken(self._member.broken)
        except GroupBroken as error:
            self._error = error
        else:
            self._result = ModelRunnerOutput(self._plan.step, self._sampled, *sums)

    async def computed(self) -> None:
        if not self._task.done():
            await self._task  # the task does not raise, and nobody who awaits it is cancelled

    def get_output(self) -> ModelRunnerOutput:
        self._executor.check()
        if self._error is not None:
            self._member.leave(str(self._error))
            raise self._error
        assert self._result is not None
        self._executor.progress += 1
        return self._result


class LaterRegrouped(list[Regrouped]):
    """Worker results that arrive at a later virtual time. The list itself is empty; the runtime of
    the process awaits it."""

    def __init__(self, answers: Coroutine[Any, Any, list[Regrouped]]) -> None:
        super().__init__()
        self._answers = answers

    def __await__(self) -> Generator[Any, Any, list[Regrouped]]:
        return self._answers.__await__()


class SimExecutor(Executor):
    """An executor without tensors. It reads only the tokens in its own slots, so tokens that a slot
    has lost make the outputs wrong."""

    def __init__(
        self,
        process: Process,
        step_s: float = 0.004,
        groups: SimGroups | None = None,
        weights: int = 0,
    ) -> None:
        """`step_s`: seconds of a step without the time for each token. `groups`: where engines that
        share experts form groups. `weights`: number of the weights, on which every token
        depends."""
        self.process = process
        self._weights = weights
        self._step_s = step_s
        self.member: SimMember | None = None
        self.last_step: SimGroupStep | None = None
        self._groups = groups
        self._store: tuple[str, int] | None = None
        self._aborts = 0
        self.hangs = False
        """Whether steps do not finish although the process is alive."""
        self.sleep_level = 0
        self.worker_lost = False
        """Whether a worker is lost. Until it is repaired, steps and groups fail."""
        self.is_repairing = False
        """Whether the engine has noticed that a worker is lost, and replaces it."""
        self._worker_pid = 1
        """Identifies its worker: a replaced one has another number."""
        self.on_poison: Callable[[], None] = lambda: None
        """Called in the step that computes a poison request."""
        self.progress = 0
        self._rows: dict[int, tuple[dict[int, int], int]] = {}
        self._repair_times = process.kernel.random(f"repair:{process.name}")

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        if self._groups is not None:
            self._store = self._groups.open_store(self.process)
        return ExecutorLimits(NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE)

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        assert not self.sleep_level, "it computes while it sleeps"
        for row in plan.new_requests:
            self._rows[row.slot] = (dict(enumerate(row.token_ids)), row.sampler.seed)
            if row.sampler.seed == POISON_SEED:
                self.on_poison()
        sampled = []
        rows = zip(plan.slots, plan.starts, plan.num_tokens, plan.samples, strict=True)
        for slot, start, count, samples in rows:
            if samples:
                tokens, seed = self._rows[slot]
                end = start + count
                tokens[end] = token = next_token(tokens[end - 1], end, seed, self._weights)
                sampled.append(token)
        time_s = self._step_s + _TOKEN_S * sum(plan.num_tokens)
        if self._groups is not None:
            self.last_step = SimGroupStep(self, plan, sampled, time_s)
            return self.last_step
        at = self.process.time() + time_s
        return SimStep(self, ModelRunnerOutput(plan.step, sampled), at)

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        if not groups.keep_states:
            self._rows.clear()
        if groups.weights is not None and groups.weights.number:
            return self._read_weights(groups)
        wakes, self.sleep_level = self.sleep_level > groups.sleep_level, groups.sleep_level
        if wakes:
            return LaterRegrouped(self._wake())
        return [] if self._groups is None else LaterRegrouped(self._form(self._groups, groups))

    def _read_weights(self, groups: GroupPlan) -> list[Regrouped]:
        """Reads the weights without delay, even on a wake-up: `SimEngine` adds the loading time."""
        self.check()
        assert groups.weights is not None
        weights = weights_in(groups.weights.path)
        if weights == BROKEN_WEIGHTS:
            return [Regrouped(0, groups.generation, refusal="the weights are broken")]
        self._weights, self.sleep_level = weights, groups.sleep_level
        return []

    async def _wake(self) -> list[Regrouped]:
        self.check()
        await asyncio.sleep(_REPAIR_S * self._repair_times.random())
        self.check()
        return []

    async def _form(self, groups: SimGroups, plan: GroupPlan) -> list[Regrouped]:
        if self.member is not None:
            self.member.leave("it formed another group")
        self.member, self.last_step = None, None
        aborts = self._aborts
        self.check()
        self.member = await groups.form(
            self.process, plan, lambda: self._aborts > aborts or self.worker_lost
        )
        await self.wait_while_hanging()
        self.check()
        if self._aborts > aborts:
            self.member.leave("aborted")
        if self.member.broken is not None:
            raise GroupBroken(self.member.broken)
        return []

    async def wait_while_hanging(self) -> None:
        while self.hangs and not self.worker_lost:
            await asyncio.sleep(1.0)

    def lose_worker(self) -> None:
        """Makes a worker die. The other workers and the peers of the group notice it."""
        self.worker_lost = True
        if self.member is not None:
            self.member.leave("a worker died")

    def check(self) -> None:
        if self.worker_lost:
            raise WorkerLost("a worker died")

    def repair(self) -> Any:
        return self._repair()

    async def _repair(self) -> None:
        self.is_repairing = True
        await asyncio.sleep(_REPAIR_S * self._repair_times.random())
        self.worker_lost = self.is_repairing = False
        self._worker_pid += 1

    def abort(self) -> None:
        self._aborts += 1
        if self.member is not None:
            self.member.leave("aborted")

    @property
    def store(self) -> tuple[str, int] | None:
        return self._store

    @property
    def progress_counter(self) -> int:
        return self.progress

    def workers(self) -> tuple[WorkerInfo, ...]:
        return (WorkerInfo(0, 0, 0, self._worker_pid),)

    def shutdown(self) -> None:
        self._rows.clear()


class NumberDetokenizer:
    """Makes the number of a token its text."""

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
