"""A worker without tensors, whose output depends on every block of the request.

Its KV cache holds token ids instead of keys and values. A row writes the tokens that it computes
into its blocks, reads its whole context back through its block table, and samples a hash of that
context. Any wrong block, stale prefix, lost token or wrong position changes the output.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from swell.configs.schema import Config, load
from swell.engine.core import EngineCore, OnStart, ignore_started
from swell.engine.executor import Executor, ExecutorLimits, Progress, WorkerInfo
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.step.multi_step import ExtraSteps, OutputOfPasses, RowEnds
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
)

VOCAB = 50


def next_token(context: Sequence[int], seed: int = 0) -> int:
    digest = hashlib.sha256(repr((seed, tuple(context))).encode()).digest()
    return digest[0] % VOCAB


def expected(request: EngineCoreRequest) -> list[int]:
    """Returns the reference output of `request`, computed without an engine or blocks."""
    tokens = list(request.prompt_token_ids) + list(request.output_token_ids)
    outputs = list(request.output_token_ids)
    while len(outputs) < request.max_tokens:
        outputs.append(next_token(tokens, request.sampler.seed))
        tokens.append(outputs[-1])
        ended = outputs[-1] in request.eos_token_ids + request.stop_token_ids
        if ended and len(outputs) >= request.min_tokens:
            break
    return outputs


class FakeWorker:
    def __init__(
        self, num_blocks: int, block_tokens: int, offload_blocks: tuple[int, int] = (0, 0)
    ) -> None:
        self.block_tokens = block_tokens
        sizes = (num_blocks, *offload_blocks)
        self.tiers = [[[-1] * block_tokens for _ in range(size)] for size in sizes]
        self.cache = self.tiers[0]
        self.tokens: dict[int, dict[int, int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.ends = RowEnds(lambda slot, position: self.tokens[slot].get(position, -2))
        self.ended: set[int] = set()
        """Slots whose row finished within a plan and was detected."""
        self.num_sampled = 0
        self.knows_ends = lambda slot: slot % 2 == 0
        """Whether the worker detects that the row of a slot finishes within a plan."""
        self.draft_tiers = [[list(block) for block in tier] for tier in self.tiers]
        """The draft model's cache: the same tokens in the same blocks."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        first, extra_steps = self.compute(plan), ExtraSteps(plan, self._has_ended)
        outputs = [first, *map(self.compute, extra_steps)]
        if not plan.extra_steps:
            return first
        passes = [Computed(output) for output in outputs]
        return OutputOfPasses(plan, passes, extra_steps.rows).get_output()

    def _has_ended(self, slot: int, position: int) -> bool:
        """Whether the row finishes here and, like a real worker that detects this, the worker knows
        it."""
        has_ended = self.knows_ends(slot) and self.ends.has_ended(slot, position)
        if has_ended:
            self.ended.add(slot)
        return has_ended

    def _token(self, slot: int, position: int) -> int:
        """Returns the token at a position. After a detected finish, plans that were made before it
        compute arbitrary tokens."""
        known = self.tokens[slot]
        return known.get(position, -2) if slot in self.ended else known[position]

    def compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one forward pass."""
        for copy in plan.copies:
            for tiers in (self.tiers, self.draft_tiers):
                content = tiers[copy.source_tier][copy.source_block]
                tiers[copy.target_tier][copy.target_block] = list(content)
        for row in plan.new_requests:
            self.tokens[row.slot] = dict(enumerate(row.token_ids))
            self.tables[row.slot] = list(row.block_ids)
            self.seeds[row.slot] = row.sampler.seed
            self.ends.add_request(row)
            self.ended.discard(row.slot)
        for blocks in plan.new_blocks:
            self.tables[blocks.slot] += blocks.block_ids
        rows = list(zip(plan.slots, plan.starts, plan.num_tokens, plan.samples, strict=True))
        assert len({slot for slot, *_ in rows}) == len(rows), "a slot has two rows"
        for row, drafts in plan.drafts.items():
            slot, start, count, samples = rows[row]
            assert samples == len(drafts) + 1 <= count
            for position, token in enumerate(drafts, start + count - len(drafts)):
                self.tokens[slot][position] = token
        for slot, start, count, _ in rows:
            for position in range(start, start + count):
                self._write(slot, position, self._token(slot, position))
        drawn: list[int] = []
        accepted = {}
        for row, (slot, start, count, samples) in enumerate(rows):
            kept = self._draw(slot, start + count, samples)
            self.num_sampled += len(kept)
            drawn += kept
            if row in plan.drafts:
                accepted[row] = len(kept) - 1
        return ModelRunnerOutput(
            plan.step, drawn, accepted=accepted, proposals=self.propose(plan, accepted)
        )

    def propose(self, plan: SchedulerOutput, accepted: dict[int, int]) -> dict[int, list[int]]:
        """Proposes drafts as a draft model that equals the model would, if the draft cache has
        every token."""
        found: dict[int, list[int]] = {}
        cache = self.draft_tiers[0]
        for row, slot in enumerate(plan.slots):
            tokens, table = self.tokens[slot], self.tables[slot]
            for position in range(plan.starts[row], plan.starts[row] + plan.num_tokens[row]):
                block, offset = divmod(position, self.block_tokens)
                cache[table[block]][offset] = self._token(slot, position)
            if row not in plan.proposals:
                continue
            found[row], count = [], plan.proposals[row]
            drafts, right = len(plan.drafts.get(row, ())), accepted.get(row, 0)
            if right < drafts:
                count = min(count, right + 1)
            newest = plan.starts[row] + plan.num_tokens[row] - drafts + right
            places = [divmod(position, self.block_tokens) for position in range(newest + count)]
            context = [cache[table[block]][offset] for block, offset in places[:newest]]
            proposal = tokens[newest]
            for block, offset in places[newest:]:
                cache[table[block]][offset] = proposal  # every proposal has a place in the cache
                context.append(proposal)
                proposal = next_token(context, self.seeds[slot])
                found[row].append(proposal)
        return found

    def _draw(self, slot: int, end: int, samples: int) -> list[int]:
        """Returns the tokens after each of the last `samples` positions before `end`, up to the
        first that differs from the draft at the next position."""
        drawn: list[int] = []
        for position in range(end + 1 - samples, end + 1):
            token = next_token([self._read(slot, p) for p in range(position)], self.seeds[slot])
            drawn.append(token)
            if position == end or self._token(slot, position) != token:
                self.tokens[slot][position] = token
                break
        return drawn

    def _write(self, slot: int, position: int, token: int) -> None:
        block, offset = divmod(position, self.block_tokens)
        self.cache[self.tables[slot][block]][offset] = token

    def _read(self, slot: int, position: int) -> int:
        block, offset = divmod(position, self.block_tokens)
        return self.cache[self.tables[slot][block]][offset]


class Computed(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


class LateOutput(AsyncModelRunnerOutput):
    """An output that runs all steps up to its own only when it is read, which is as late as
    possible."""

    def __init__(self, executor: FakeExecutor, step: int) -> None:
        self.executor = executor
        self.step = step

    def get_output(self) -> ModelRunnerOutput:
        return self.executor.run_until(self.step)


class FakeExecutor(Executor):
    def __init__(
        self, num_blocks: int, block_tokens: int, offload_blocks: tuple[int, int] = (0, 0)
    ) -> None:
        self._sizes = (num_blocks, block_tokens, offload_blocks)
        self.worker = FakeWorker(*self._sizes)
        self.plans: list[SchedulerOutput] = []
        self.groups: list[GroupPlan] = []
        self._queue: deque[SchedulerOutput] = deque()

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        raise NotImplementedError

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        self.plans.append(plan)
        self._queue.append(plan)
        return LateOutput(self, plan.step)

    def run_until(self, step: int) -> ModelRunnerOutput:
        while True:
            output = self.worker.execute_model(self._queue.popleft())
            if output.step == step:
                return output

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Forms the groups in the worst case: a replaced worker has lost all slots and tokens."""
        self.groups.append(groups)
        if not groups.keep_states:
            self._queue.clear()
            self.worker = FakeWorker(*self._sizes)
        return [Regrouped(0, groups.generation)]

    def abort(self) -> None:
        raise NotImplementedError

    def workers(self) -> tuple[WorkerInfo, ...]:
        return ()

    def shutdown(self) -> None:
        pass


def make_core(
    num_blocks: int = 64, max_model_len: int = 64, block_tokens: int = 4, **scheduler: object
) -> EngineCore:
    prefix_caching = scheduler.pop("prefix_caching", True)
    offload: Any = scheduler.pop("offload_blocks", (0, 0))
    drafts = scheduler.pop("drafts", {})
    config: Config = load(
        {
            "model": {"path": "none"},
            "cache": {"block_tokens": block_tokens, "prefix_caching": prefix_caching},
            "scheduler": {"max_rows": 8, **scheduler},
            "drafts": drafts,
        }
    )
    executor = FakeExecutor(num_blocks, block_tokens, offload)
    limits = ExecutorLimits(num_blocks, max_model_len, VOCAB, offload_blocks=offload)
    return EngineCore(config, executor, limits)


def run(core: EngineCore, on_start: OnStart = ignore_started) -> dict[str, list[EngineCoreOutput]]:
    """Steps the core until it is idle; returns the outputs by request."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(20_000):
        if not core.has_work:
            return outputs
        for answers in core.step(on_start).values():
            for answer in answers:
                outputs.setdefault(answer.request_id, []).append(answer)
    raise AssertionError("the engine makes no progress")


def token_ids(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def regroup(core: EngineCore) -> None:
    """Drops all steps in flight and forms the groups again, as `EngineServer` does."""
    core.wave_member.broken("a test")
    core.regroup(GroupPlan(generation=0))
    core.wave_member.joined()
