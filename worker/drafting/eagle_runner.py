"""Proposes tokens with a head that reads the target model's hidden states (EAGLE, Li et al. 2024,
arXiv:2401.15077).

At position i the head reads the target model's features of position i and the token at i + 1, which
is known one step earlier, and predicts the token at i + 2. For a row with positions s .. e - 1 in
the step and the newest token at position p <= e:

    position       s ......... p - 1          p            p + 1
    features       of the target model        own of p - 1 own of p
    next token     t(s+1) .... newest         g1           g2
    pass 1         computed    computed -> g1
    pass 2                                    computed -> g2

So the invariant of `draft_runner.py` holds, with one exception: K and V of a block's last position
depend on the token after the block. If a block is reused that was computed before another token, a
proposal may be worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.worker.drafting.draft_runner import ProposingRunner, StepHidden
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput


class DraftHead(Protocol):
    """A draft head of a target model."""

    def select(self, hidden: StepHidden) -> Sequence[Tensor]:
        """Returns the tensors of a step that the head reads, [T, hidden] each."""

    def features(self, selected: Sequence[Tensor]) -> Tensor:
        """Some rows of the selected tensors -> features [N, hidden of the head]"""

    def __call__(self, ids: Tensor, features: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """ids [T], the token after each position; features [T, hidden] -> the head's own features
        and the input of `argmax`, both for `batch.hidden_indices`, [S, hidden]"""

    def argmax(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> tokens of the target model's vocabulary, [S] int64"""


class EagleRunner(ProposingRunner):
    newest = 0

    def __init__(
        self, model: DraftHead, states: RequestStates, blocks: BlockTables, max_tokens: int
    ) -> None:
        """The arguments are those of `DraftRunner`; no step is captured."""
        super().__init__(states, blocks)
        self._model = model
        self._batches = BatchBuilder(states, blocks, max_tokens)
        self._own: Tensor = torch.empty(0)
        """[proposing rows, hidden] the head's features of the last pass."""

    def _first_pass(
        self, step: SchedulerOutput, plan: SchedulerOutput, hidden: StepHidden
    ) -> Tensor | None:
        selected = self._model.select(hidden)
        if step.num_tokens != plan.num_tokens:  # omits rejected drafts
            kept = _kept(plan.num_tokens, step.num_tokens)
            index = to_device(kept, selected[0].device)
            selected = [each.index_select(0, index) for each in selected]
        return self._pass(step, self._model.features(selected))

    def _next_pass(self, step: SchedulerOutput, staying: list[int]) -> Tensor | None:
        own = self._own
        if len(staying) < len(own):
            own = own.index_select(0, to_device(np.array(staying), own.device))
        return self._pass(step, own)

    def _pass(self, step: SchedulerOutput, features: Tensor) -> Tensor | None:
        """Computes one pass with features [T, hidden] of the step's T tokens."""
        batch = self._batches.build(step)
        slots_np = np.repeat(np.array(step.slots, dtype=np.int64), step.num_tokens)
        table, next_positions = self._states.token_ids, batch.positions + 1
        ids = table[to_device(slots_np, table.device), next_positions].long()
        self._own, last = self._model(ids, features, batch)
        if not batch.num_samples:
            return None
        tokens = self._model.argmax(last)
        self._states.write_sampled(batch.sample_slots, batch.sample_positions + 1, tokens)
        return tokens


def _kept(counts: list[int], fewer: list[int]) -> np.ndarray:
    """For tokens of rows with `counts` tokens each, stored consecutively, returns the indices of
    the first `fewer` tokens of each row, int64."""
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(sum(fewer)) - np.repeat(np.cumsum(fewer) - fewer, fewer)
    return np.repeat(firsts, fewer) + offsets
