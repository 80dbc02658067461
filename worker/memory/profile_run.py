"""The largest steps that a scheduler can send, computed once before the KV cache exists.

They show how much memory a step needs besides the cache. So they need no cache of their own: all
positions of all rows are in block 0, whose content is undefined. Nobody reads their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from swell.configs.drafts import BY_WORKERS
from swell.configs.schema import Config
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import max_model_len
from swell.worker.memory import kv_cache
from swell.worker.memory.new_weights import ModelShape
from swell.worker.model_interfaces import Model
from swell.worker.pooling.pooler import max_text_tokens
from swell.worker.runner import ModelRunner
from swell.worker.sampler_wire import PoolingParams, SamplerParams
from swell.worker.wire import NewRequest, SchedulerOutput

PROFILE_BLOCKS = 1
"""The blocks of the KV cache of a profile run."""
PROFILE_CAPTURES = 4
"""How many steps of a model are captured, to estimate the memory of all captures."""
_LOGPROBS = 20
"""The most likely tokens that a request may ask for at each position."""
_ALLOWED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a step: its known tokens before the step are 0 .. start - 1."""

    start: int
    num_tokens: int
    drafts: int = 0
    """How many of its last tokens are drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestSteps:
    """The largest steps of an engine."""

    config: Config
    max_model_len: int
    """The longest sequence, in tokens."""
    vocab_size: int
    samples: bool
    """See `WorkerLimits`; the same holds for `keeps_kv`."""
    keeps_kv: bool

    @classmethod
    def of(cls, config: Config, model: Model, shape: ModelShape) -> LargestSteps:
        """Returns the largest steps of a loaded model."""
        length = max_model_len(config.model, shape.hf_config)
        keeps_kv = kv_cache.keeps_kv(model.attention_layers())
        if shape.pooling is not None:
            step_tokens = None if keeps_kv else config.scheduler.max_tokens_per_step
            length = max_text_tokens(shape.pooling, model, config.model, length, step_tokens)
        return cls(
            config=config,
            max_model_len=length,
            vocab_size=shape.hf_config.get_text_config().vocab_size,
            samples=shape.pooling is None,
            keeps_kv=keeps_kv,
        )

    def within(self, free_bytes: int, block_bytes: int) -> LargestSteps:
        """Returns the largest steps if this memory were left for the KV cache, which bounds the
        longest sequence."""
        if not block_bytes or not self.keeps_kv:
            return self
        blocks = max(1, free_bytes // block_bytes)
        length = min(self.max_model_len, blocks * self.config.cache.block_tokens)
        return replace(self, max_model_len=length)

    def agreed(self, mesh: Mesh) -> LargestSteps:
        """Returns the largest steps of all workers of the engine, the same on each: their free
        memory differs. Every worker calls it at the same time."""
        lengths = torch.tensor([self.max_model_len], device=mesh.device)
        for group in (mesh.tensor, mesh.pipeline):
            lengths = group.all_gather(lengths, 0).min(dim=0, keepdim=True).values
        return replace(self, max_model_len=int(lengths))

    def plans(self) -> list[SchedulerOutput]:
        """Returns the plans of these steps. Each has new requests with all parameters that need
        memory: most of it for the most rows, for the longest context, and for the most drafts."""
        steps = [self._most_rows(), [self._longest_row()]]
        if drafts := self._most_drafts():
            steps.append(drafts)
        return [self._plan(number, rows) for number, rows in enumerate(steps)]

    def _most_rows(self) -> list[_Row]:
        """Returns as many rows as possible, with as many tokens as possible in total."""
        scheduler = self.config.scheduler
        rows = min(scheduler.max_rows, scheduler.max_tokens_per_step)
        each, rest = divmod(scheduler.max_tokens_per_step, rows)
        counts = [each + (row < rest) for row in range(rows)]
        return [_Row(0, min(count, self.max_model_len)) for count in counts]

    def _longest_row(self) -> _Row:
        """Returns one row with as many tokens as possible, at the end of the longest sequence."""
        count = min(self.config.scheduler.max_tokens_per_step, self.max_model_len)
        return _Row(self.max_model_len - count if self.keeps_kv else 0, count)

    def _most_drafts(self) -> list[_Row]:
        """Returns as many rows with as many drafts as a step with drafts may have."""
        drafts, scheduler = self.config.drafts, self.config.scheduler
        most = min(drafts.step_tokens, scheduler.max_tokens_per_step)
        each = min(drafts.max_tokens, most - 1, self.max_model_len - 1)
        if each < 1:
            return []
        rows = min(scheduler.max_rows, most // (1 + each))
        return [_Row(0, 1 + each, each)] * rows

    def _plan(self, number: int, rows: Sequence[_Row]) -> SchedulerOutput:
        ends = [row.start + row.num_tokens for row in rows]
        return SchedulerOutput(
            number,
            new_requests=[self._request(slot, row) for slot, row in enumerate(rows)],
            slots=list(range(len(rows))),
            starts=[row.start for row in rows],
            num_tokens=[row.num_tokens for row in rows],
            samples=[1 + row.drafts if self.samples else 0 for row in rows],
            drafts={
                at: self._tokens(at, end)[end - row.drafts :]
                for at, (row, end) in enumerate(zip(rows, ends, strict=True))
                if row.drafts
            },
            proposals={at: count for at, end in enumerate(ends) if (count := self._proposals(end))},
        )

    def _proposals(self, end: int) -> int:
        """Returns how many tokens the draft model proposes after position `end`."""
        if self.config.drafts.method not in BY_WORKERS:
            return 0
        return min(self.config.drafts.max_tokens, self.max_model_len - end)

    def _request(self, slot: int, row: _Row) -> NewRequest:
        end = row.start + row.num_tokens
        known = end - row.drafts
        blocks = -(-(end + self._proposals(end)) // self.config.cache.block_tokens)
        return NewRequest(slot, self._tokens(slot, known), known, [0] * blocks, self._params(slot))

    def _tokens(self, slot: int, count: int) -> list[int]:
        """Returns different tokens, so that they choose different experts."""
        return [(37 * position + 11 * slot) % self.vocab_size for position in range(count)]

    def _params(self, slot: int) -> SamplerParams:
        if not self.samples:
            return SamplerParams(pooling=PoolingParams())
        top = min(_LOGPROBS, self.vocab_size - 1)
        return SamplerParams(
            temperature=1.0,
            top_k=top,
            top_p=0.9,
            min_p=0.01,
            seed=slot,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias={0: 1.0},
            bad_words=[[0, 1]],
            allowed_token_ids=list(range(min(_ALLOWED_TOKENS, self.vocab_size))),
            logprobs=top,
            prompt_logprobs=top,
            routed_experts=self.config.model.routed_experts,
        )


def profile(runner: ModelRunner, steps: LargestSteps) -> Iterator[int | None]:
    """Computes the steps with a runner that is dropped afterwards. Then, for each list of its
    `captures`, yields how many steps may be captured later, captures a few of them, and yields None
    after each capture. Every worker of the engine does it at the same time."""
    for plan in steps.plans():
        output = runner.execute_model(plan)
        if output is not None:
            failed = output.get_output().failed
            assert not failed, f"the largest step {plan.step} is refused: {failed}"
    runner.drain()
    runner.drop_captures()  # those of the steps above
    for captures in runner.captures:
        yield len(captures)
        for capture in captures[:PROFILE_CAPTURES]:
            capture()
            yield None
    runner.drop_captures()
