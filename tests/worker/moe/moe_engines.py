"""Engines that share experts, as threads of one process, for the mixture-of-experts tests.

Each worker runs on its own thread; the stores are those of the workers themselves, over loopback.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from swell.configs.schema import Config, load
from swell.worker.wire import (
    GroupPlan,
    ModelRunnerOutput,
    NewRequest,
    Regrouped,
    SamplerParams,
    SchedulerOutput,
)
from swell.worker.worker import Worker
from tests.support.deadlines import HANG_S

BLOCK_TOKENS = 4
ROW_BLOCKS = 16
MAX_ROWS = 4
NEW_TOKENS = 6
PROMPTS = [[(37 * i + 11 * n) % 300 + 3 for i in range(n)] for n in (5, 17, 1, 9, 12, 3)]


class WorkerThread:
    """One worker, whose calls run in order on its own thread."""

    def __init__(self, config: Config, rank: int) -> None:
        self.worker = Worker(config, rank)
        self.pool = ThreadPoolExecutor(1)

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self.pool.submit(getattr(self.worker, method), *args)


class Engine:
    """The workers of one engine, and a scheduler that computes all rows in every step."""

    def __init__(self, config: Config) -> None:
        parallel = config.parallel
        self.output_rank = parallel.world - parallel.tensor
        self.members = [WorkerThread(config, rank) for rank in range(parallel.world)]
        collect([member.call("load") for member in self.members])
        self.limits = collect([member.call("measure") for member in self.members])
        collect(
            [
                member.call("init_cache", MAX_ROWS * ROW_BLOCKS, BLOCK_TOKENS * ROW_BLOCKS)
                for member in self.members
            ]
        )
        self.store = self.members[0].call("open_store").result()
        self.generation = 0
        self.tokens: list[list[int]] = []
        """The tokens of each row: its prompt, then the sampled tokens."""
        self.computed: list[int] = []
        self.sampler = SamplerParams()
        self.hidden: list[torch.Tensor] = []
        """The outputs of the last stage's model, one for each step with rows."""
        last = self.members[self.output_rank].worker
        last.model.register_forward_hook(lambda _m, _a, out: self.hidden.append(out.clone()))

    @property
    def workers(self) -> list[Worker]:
        return [member.worker for member in self.members]

    def local_experts(self) -> list[set[int]]:
        """Returns the experts that each worker holds."""
        return [set(worker.model.moe_layers()[0].local_experts) for worker in self.workers]

    def regroup(self, plan: GroupPlan) -> list[Future[Regrouped]]:
        self.generation += 1
        several = len(self.members) > 1
        plan = GroupPlan(
            self.generation,
            self.store if several else None,
            plan.epoch,
            plan.engines,
            plan.index,
            plan.expert_store,
            plan.keep_states,
        )
        return [member.call("regroup", plan) for member in self.members]

    def start(self, prompts: Sequence[Sequence[int]], sampler: SamplerParams | None = None) -> None:
        """Starts these rows; from the next step on, only they are computed."""
        assert len(prompts) <= MAX_ROWS
        self.sampler = sampler or SamplerParams()
        self.tokens, self.computed = [list(prompt) for prompt in prompts], []

    def submit(self, step: int, work: bool = False, pause: bool = False) -> list[Future[Any]]:
        """Submits a step of all rows, or a dummy step if there are none; returns a future for each
        worker."""
        rows = range(len(self.tokens))
        new = []
        if not self.computed:
            self.computed = [0] * len(rows)
            new = [
                NewRequest(
                    row,
                    self.tokens[row],
                    len(self.tokens[row]),
                    list(range(row * ROW_BLOCKS, (row + 1) * ROW_BLOCKS)),
                    self.sampler,
                )
                for row in rows
            ]
        starts = list(self.computed)
        self.computed = [len(tokens) for tokens in self.tokens]
        counts = [end - start for start, end in zip(starts, self.computed, strict=True)]
        plan = SchedulerOutput(
            step, 0, new, [], list(rows), starts, counts, [True] * len(rows), work, pause
        )
        return [member.call("execute_model", plan) for member in self.members]

    def finish(self, futures: list[Future[Any]]) -> ModelRunnerOutput:
        output: ModelRunnerOutput = collect(futures)[self.output_rank].get_output()
        for tokens, token in zip(self.tokens, output.sampled_token_ids, strict=True):
            tokens.append(token)
        return output

    def shutdown(self) -> None:
        collect([member.call("shutdown") for member in self.members])
        for member in self.members:
            member.pool.shutdown()


class EngineGroup:
    """Engines of one model; the engines in `members` share its experts."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.config = load(
            str(folder),
            {
                "model.dtype": "float32",
                "model.device": "cpu",
                "model.cpu_threads": 1,
                "model.max_model_len": BLOCK_TOKENS * ROW_BLOCKS,
                "cache.block_tokens": BLOCK_TOKENS,
                "scheduler.max_rows": MAX_ROWS,
                "parallel.expert": True,
                **{key.replace("__", "."): value for key, value in overrides.items()},
            },
        )
        self.engines: list[Engine] = []
        self.members: list[Engine] = []
        self.epoch = self.step = 0

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *_error: object) -> None:
        for engine in self.engines:
            for worker in engine.workers:
                worker.abort()
        for engine in self.engines:
            engine.shutdown()

    def add(self) -> Engine:
        self.engines.append(Engine(self.config))
        return self.engines[-1]

    def regroup(self, *members: Engine, keep_states: bool = False) -> list[list[Regrouped]]:
        """Forms a group in which these engines share experts; returns the result of each worker."""
        return [collect(futures) for futures in self.submit_regroup(*members, keep=keep_states)]

    def submit_regroup(self, *members: Engine, keep: bool = False) -> list[list[Future[Any]]]:
        self.members, self.epoch = list(members), self.epoch + 1
        store = members[0].store if len(members) > 1 else None
        return [
            engine.regroup(GroupPlan(0, None, self.epoch, len(members), i, store, keep))
            for i, engine in enumerate(members)
        ]

    def advance(self) -> list[ModelRunnerOutput]:
        """Runs one step of all members; returns their outputs. Raises the first error of a worker,
        after all of them have ended the step."""
        self.step += 1
        started = [engine.submit(self.step) for engine in self.members]
        futures = [future for of_engine in started for future in of_engine]
        done, waiting = wait(futures, timeout=HANG_S, return_when=FIRST_EXCEPTION)
        if waiting:  # for a worker that has failed
            for engine in self.members:
                for worker in engine.workers:
                    worker.abort()
            collect([future for future in futures if future in done])
        pairs = zip(self.members, started, strict=True)
        return [engine.finish(futures) for engine, futures in pairs]


def collect(futures: list[Future[Any]]) -> list[Any]:
    """Returns all results in order; raises the first exception after all calls have finished."""
    wait(futures, timeout=HANG_S)
    return [future.result(timeout=0) for future in futures]


@torch.no_grad()
def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(engine_group: EngineGroup, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Computes `rows`, the prompt indices of each member; returns the answers to all prompts in
    that order."""
    for engine, mine in zip(engine_group.members, rows, strict=True):
        engine.start([PROMPTS[i] for i in mine])
    for _ in range(NEW_TOKENS):
        engine_group.advance()
    return [
        tokens[len(PROMPTS[i]) :]
        for engine, mine in zip(engine_group.members, rows, strict=True)
        for i, tokens in zip(mine, engine.tokens, strict=True)
    ]
