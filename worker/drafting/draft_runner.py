"""Proposes the next tokens of a step's rows after the step; `DraftRunner` does it with a small
model.

A draft model keeps this invariant: after each step it has K and V of every position for which the
target model has them. So a block that is shared, copied, or found in the prefix cache serves both
models. Therefore it computes the tokens of every step, whether or not it proposes any. Take a row
with positions s .. e - 1 in the step, which may end with drafts, and with the newest token at
position p <= e after sampling:

    position       s ....... p - 1     p          p + 1      p + 2
    token          of the step         newest     g1         g2
    pass 1         computed            computed -> g1
    pass 2                                        computed -> g2

It reads all tokens from the table of the target model's states, and writes its proposals there,
after the newest token: only its own passes read them before they are overwritten. The cache entries
that it writes from p on are computed again when the target model computes these positions.

Proposals never change an answer (see `draft_verification.py`): a wrong one only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swell.configs.schema import ParallelConfig
from swell.kernels.inputs import Bucket
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import Model
from swell.worker.sample.sampler import PendingProposals, SamplerOutput
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.buckets import Buckets, EngineStep, NoBuckets
from swell.worker.step.captured_forward import make_forward
from swell.worker.step.forward import HeadOutput
from swell.worker.step.input_batch import BatchBuilder
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepHidden:
    """The results of the target model in a step, for a draft model that reads them; valid until the
    target model's next step."""

    last: Tensor
    """[T, hidden] normed hidden states of all tokens, if `NoDraftModel.reads_hidden`."""
    layer_inputs: Sequence[Tensor]
    """[T, hidden] each: the inputs of the layers that the head taps (see `LayerTaps`)."""


class NoDraftRunner:
    """The runner of a worker without a draft model."""

    @property
    def progress(self) -> int:
        """The same as `ModelRunner.progress`."""
        return 0

    @property
    def captures(self) -> list[Callable[[], None]]:
        """Functions that capture its passes, like those in `ModelRunner.captures`."""
        return []

    def drop_captures(self) -> None:
        """Forgets all captured passes."""

    def after_sampling(
        self, plan: SchedulerOutput, sampled: SamplerOutput | None, hidden: StepHidden
    ) -> None:
        """Called after a step was computed. `sampled`: the step's tokens, to which the proposals
        that the plan requests are added; None: nothing was sampled."""


@dataclass(slots=True)
class ProposingRow:
    """The tokens to propose for one row."""

    row: int
    position: int
    """The position of the row's newest token."""
    count: int


class ProposingRunner(NoDraftRunner):
    """A runner that computes one token per pass for each row with proposals."""

    newest = 1
    """1: a row's first proposal is computed at the position of its newest token; 0: at the position
    before."""

    def __init__(self, states: RequestStates, blocks: BlockTables) -> None:
        self._states, self._blocks = states, blocks

    def after_sampling(
        self, plan: SchedulerOutput, sampled: SamplerOutput | None, hidden: StepHidden
    ) -> None:
        proposing = self._rows_to_propose(plan, sampled)
        pending = PendingProposals(list(plan.proposals))
        num_tokens, samples = plan.num_tokens.copy(), [0] * len(plan.slots)
        for each in proposing:
            num_tokens[each.row] = each.position + self.newest - plan.starts[each.row]
            samples[each.row] = 1
        step = SchedulerOutput(
            plan.step, slots=plan.slots, starts=plan.starts, num_tokens=num_tokens, samples=samples
        )
        tokens = self._first_pass(step, plan, hidden)
        index = 0
        while proposing and tokens is not None:
            pending.add([each.row for each in proposing], tokens)
            index += 1
            staying = [at for at, each in enumerate(proposing) if each.count > index]
            proposing = [proposing[at] for at in staying]
            if proposing:
                ones = [1] * len(proposing)
                slots = [plan.slots[each.row] for each in proposing]
                starts = [each.position - 1 + self.newest + index for each in proposing]
                step = SchedulerOutput(
                    plan.step, slots=slots, starts=starts, num_tokens=ones, samples=ones
                )
                tokens = self._next_pass(step, staying)
        if sampled is not None and plan.proposals:
            sampled.pending_proposals = pending

    def _first_pass(
        self, step: SchedulerOutput, plan: SchedulerOutput, hidden: StepHidden
    ) -> Tensor | None:
        """Computes the tokens of `step`: those of the target model's `plan`, without rejected
        drafts in rows with proposals. Returns the first proposed token of each row that samples,
        [proposing rows] int64, as a copy that is also written to the states; None: no row
        samples."""
        raise NotImplementedError

    def _next_pass(self, step: SchedulerOutput, staying: list[int]) -> Tensor | None:
        """Computes the next token of each row of `step`, and returns the same as `_first_pass`.
        `staying`: the indices of these rows in the last pass."""
        raise NotImplementedError

    def _rows_to_propose(
        self, plan: SchedulerOutput, sampled: SamplerOutput | None
    ) -> list[ProposingRow]:
        """Returns the tokens to propose, in row order."""
        if not plan.proposals or sampled is None:
            return []
        accepted = sampled.accepted()
        found = []
        for row in sorted(plan.proposals):
            count, drafts = plan.proposals[row], len(plan.drafts.get(row, ()))
            right = accepted.get(row, 0)
            if right < drafts:
                count = min(count, right + 1)
            position = plan.starts[row] + plan.num_tokens[row] - drafts + right
            places = int(self._blocks.counts_np[plan.slots[row]]) * self._blocks.block_tokens
            # The last proposal has a place in the table of tokens, but not in the cache.
            count = min(count, min(places, self._states.max_model_len) - position)
            if count > 0:
                found.append(ProposingRow(row, position, count))
        return found


class DraftRunner(ProposingRunner):
    def __init__(
        self,
        model: Model,
        enforce_eager: bool,
        states: RequestStates,
        blocks: BlockTables,
        max_tokens: int,
    ) -> None:
        """`model`: a whole model, whose attention layers are bound to caches of the blocks in
        `blocks`; `enforce_eager`: whether no step is captured; `max_tokens`: the most tokens of one
        step."""
        super().__init__(states, blocks)
        alone = Mesh.build(ParallelConfig(), 0, device=states.token_ids.device)
        self._forward = make_forward(model, states, alone, enforce_eager)
        # A row with proposals has one token more than in the step.
        step_tokens = max_tokens + states.max_rows
        needs_buckets = self._forward.needs_buckets
        self._buckets = Buckets(states.max_rows, step_tokens) if needs_buckets else NoBuckets()
        self._batches = BatchBuilder(states, blocks, step_tokens)

    @property
    def progress(self) -> int:
        return self._forward.progress

    @property
    def captures(self) -> list[Callable[[], None]]:
        return [partial(self._capture, bucket) for bucket in self._buckets.largest_first()]

    @torch.inference_mode()
    def _capture(self, bucket: Bucket) -> None:
        self._forward.capture(self._batches.build(SchedulerOutput(0), bucket), HeadOutput.ARGMAX)

    def drop_captures(self) -> None:
        self._forward.drop_captures()

    def _first_pass(
        self, step: SchedulerOutput, plan: SchedulerOutput, hidden: StepHidden
    ) -> Tensor | None:
        return self._pass(step)

    def _next_pass(self, step: SchedulerOutput, staying: list[int]) -> Tensor | None:
        return self._pass(step)

    def _pass(self, step: SchedulerOutput) -> Tensor | None:
        bucket = self._buckets.choose([EngineStep.of(step)])
        if bucket is not None:
            self._forward.reserve(self._batches, self._buckets)
        batch = self._batches.build(step, bucket)
        hidden = self._forward.hidden(batch, None, HeadOutput.ARGMAX)
        if not batch.num_samples:
            return None
        tokens, _ = self._forward.head(HeadOutput.ARGMAX, hidden, batch)
        return tokens.clone()
