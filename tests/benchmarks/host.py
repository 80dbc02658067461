"""`python -m tests.benchmarks.host`: the host's cost of a step, without a model.

The engine's side: requests that decode pass through a real scheduler and a real channel, with two
steps in flight, and the tokens are random numbers. The worker's side: the real runner around a
model that returns zeros. `sampling_baseline`: a real engine in one process answers one request; the
time of the model and its sampler is subtracted from the step.

Engine and worker are measured in processor time of their thread. The work of the channel's own
threads, which encrypt and send, is the remaining processor time of the process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swell.cluster.local import LLM, SamplingParams
from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig
from swell.coordinator.transport.channel import Inbox, Outlet, make_keys
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.scheduling.scheduler import Scheduler
from swell.engine.scheduling.step_builder import ScheduledStep
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest, EngineMessage
from swell.worker.comm.mesh import Mesh, SoloGroup
from swell.worker.runner import ModelRunner, ModelRunnerArgs
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import (
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    WorkerCommand,
    WorkerMessage,
)

ROWS = (16, 64, 256)
CONTEXTS = (128, 2048, 8000)
STEPS = 160
"""A multiple of a block's tokens, so that each row fills as many blocks as on average."""
WARMUP_STEPS = 32
MAX_MODEL_LEN = 8192 + 256
BLOCK_TOKENS = 16
VOCAB = 32_000
INGRESS = b"ingress"

_SCHEDULER = SchedulerConfig(max_rows=256, max_tokens_per_step=1 << 22)
_CACHE = CacheConfig(block_tokens=BLOCK_TOKENS)


class Clock:
    """Measures the processor time of this thread by name, one number for each step."""

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}

    def time(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.thread_time_ns()
        result = call(*args)
        self._steps.setdefault(name, []).append(time.thread_time_ns() - started)
        return result

    def medians_us(self) -> dict[str, float]:
        """Returns the medians over the steps after the warm-up."""
        return {
            name: statistics.median(steps[WARMUP_STEPS:]) / 1e3
            for name, steps in self._steps.items()
        }


class Wire:
    """A worker and an ingress, with one channel each, in one process."""

    def __init__(self) -> None:
        keys = make_keys()
        self.workers: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys)
        self.worker: Outlet[WorkerCommand] = Outlet(
            self.workers.address, WorkerCommand, keys, b"worker"
        )
        self.ingresses: Inbox[EngineMessage] = Inbox(EngineMessage, keys)
        self.ingress: Outlet[EngineCoreOutputs] = Outlet(
            self.ingresses.address, EngineCoreOutputs, keys, INGRESS
        )
        self.worker.send(ModelRunnerOutput(0))
        self.ingress.send(EngineCoreRequest("hello", [1], SamplerParams(), 1))
        list(self.workers.receive(5.0))
        list(self.ingresses.receive(5.0))

    def close(self) -> None:
        for end in (self.worker, self.ingress, self.workers, self.ingresses):
            end.close()


def requests(rows: int, context: int) -> Iterable[EngineCoreRequest]:
    """Yields requests with prompts of about `context` tokens that share nothing; their blocks fill
    at different steps."""
    rng = random.Random(rows * context)
    for row in range(rows):
        prompt = rng.choices(range(VOCAB), k=context + row % BLOCK_TOKENS)
        yield EngineCoreRequest(
            f"cmpl-{row:032x}-0", prompt, SamplerParams(), MAX_MODEL_LEN - len(prompt)
        )


def new_scheduler(rows: int, context: int) -> Scheduler:
    blocks = 256 * (MAX_MODEL_LEN // BLOCK_TOKENS + 1)
    scheduler = Scheduler(_SCHEDULER, KVCacheManager(_CACHE, blocks), MAX_MODEL_LEN, VOCAB)
    for request in requests(rows, context):
        assert scheduler.add(request, INGRESS) is None
    return scheduler


def random_output(step: ScheduledStep) -> ModelRunnerOutput:
    output = random.choices(range(VOCAB), k=sum(step.plan.samples))
    return ModelRunnerOutput(step.plan.step, output)


def engine_side(rows: int, context: int) -> dict[str, float]:
    """Returns the microseconds of a step: schedule, update, channel; and `channel_threads`, the
    time of the channel's own threads."""
    scheduler, wire, clock = new_scheduler(rows, context), Wire(), Clock()
    step = scheduler.schedule()
    assert step is not None
    whole: list[int] = []
    for _ in range(WARMUP_STEPS + STEPS):
        started = time.process_time_ns() - time.thread_time_ns()
        behind = clock.time("schedule", scheduler.schedule)
        output = random_output(step)
        clock.time("channel_worker", _to_worker_and_back, wire, behind, output)
        outputs = clock.time("update", scheduler.update, step, output)
        clock.time("channel_ingress", _to_ingress, wire, outputs)
        wire.ingress.receive(5.0)
        whole.append(time.process_time_ns() - time.thread_time_ns() - started)
        step = behind
    wire.close()
    figures = clock.medians_us()
    figures["channel_threads"] = statistics.median(whole[WARMUP_STEPS:]) / 1e3
    figures["total"] = sum(figures.values())
    return figures


def _to_worker_and_back(wire: Wire, step: ScheduledStep, output: ModelRunnerOutput) -> None:
    wire.workers.send(b"worker", step.plan)
    wire.worker.receive(5.0)
    wire.worker.send(output)
    list(wire.workers.receive(5.0))


def _to_ingress(wire: Wire, outputs: dict[bytes, Any]) -> None:
    for client, engine_outputs in outputs.items():
        wire.ingresses.send(client, EngineCoreOutputs(engine_outputs, seq=1))


class ZeroModel:
    """A model that returns zeros as hidden states, and logits of eight tokens."""

    config = None
    vocab_size = 8

    def __call__(self, batch: Any, _intermediate: Any) -> torch.Tensor:
        return torch.empty(batch.num_tokens, 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[0], 8)

    def argmax(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(hidden.shape[0], dtype=torch.int64)
        return tokens, tokens.float()


def worker_side(rows: int, context: int) -> dict[str, float]:
    """Returns the microseconds of a step on a worker whose model costs nothing."""
    mesh = Mesh(0, 0, SoloGroup(), SoloGroup(), SoloGroup())
    model: Any = ZeroModel()
    args = ModelRunnerArgs(
        model=model,
        mesh=mesh,
        scheduler=_SCHEDULER,
        cache=_CACHE,
        max_model_len=MAX_MODEL_LEN,
        device=torch.device("cpu"),
    )
    runner = ModelRunner(args)
    scheduler, clock = new_scheduler(rows, context), Clock()
    _admit(scheduler, runner)
    for _ in range(WARMUP_STEPS + STEPS):
        step = scheduler.schedule()
        assert step is not None
        output = clock.time("worker", _run, runner, step.plan)
        scheduler.update(step, output)
    return clock.medians_us()


def _admit(scheduler: Scheduler, runner: ModelRunner) -> None:
    """Adds the rows one by one: no real step has the prompts of all rows at once."""
    step = scheduler.schedule()
    assert step is not None
    for row, start, count in zip(
        step.plan.new_requests, step.plan.starts, step.plan.num_tokens, strict=True
    ):
        _run(runner, _admission(row, start, count))
    scheduler.update(step, random_output(step))


def _admission(row: NewRequest, start: int, count: int) -> SchedulerOutput:
    return SchedulerOutput(
        0, new_requests=[row], slots=[row.slot], starts=[start], num_tokens=[count], samples=[True]
    )


def _run(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    output = runner.execute_model(plan)
    assert output is not None
    return output.get_output()


class Stopwatch:
    """Measures wall time inside of calls."""

    def __init__(self) -> None:
        self.ns = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args, **kwargs)
            self.ns += time.perf_counter_ns() - started
            return result

        return timed


def sampling_baseline(model: str, tokens: int = 512) -> dict[str, float]:
    """Returns the microseconds of wall time of a step with one row in `LLM`, and of its parts other
    than the model and the sampler."""
    with LLM(model) as llm:
        runner = llm._engine.core.executor._worker.runner  # type: ignore[attr-defined]
        watch = Stopwatch()
        runner._forward = watch.around(runner._forward)
        runner.model.argmax = watch.around(runner.model.argmax)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        steps, rests = [], []
        for _ in range(5):
            watch.ns, started = 0, time.perf_counter_ns()
            llm.generate([[5, 6, 7]], params)
            elapsed = time.perf_counter_ns() - started
            steps.append(elapsed / tokens / 1e3)
            rests.append((elapsed - watch.ns) / tokens / 1e3)
    return {"step": min(steps[1:]), "rest": statistics.median(rests[1:])}


def measure() -> dict[str, float]:
    """Returns `engine.ROWS.CONTEXT.PART`, `worker.ROWS.CONTEXT` and `sampling_baseline.PART`, all
    in microseconds."""
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for rows in ROWS:
        for context in CONTEXTS:
            for part, us in engine_side(rows, context).items():
                figures[f"engine.{rows}.{context}.{part}"] = us
    for rows in (1, *ROWS):
        for context in CONTEXTS:
            figures[f"worker.{rows}.{context}"] = worker_side(rows, context)["worker"]
    return figures


def main() -> None:
    for name, us in measure().items():
        print(f"{name:36} {us:9.1f} us")


if __name__ == "__main__":
    main()
