"""The tensors of one step, from the scheduler's columns.

One flat batch, and no padding: with rows of 1, 1 and 3 tokens,

    token            0     1     2  3  4
    row              0     1     2  2  2
    query_start      0     1     2        5
    positions        s0    s1    s2 s2+1 s2+2      (s: the row's start)
    logits_indices   0     1           4           (of the rows that sample)

What the host knows reaches the device in one copy; token ids and blocks are looked up on the
device, where a token drawn by the previous step already stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.inputs import Inputs, gather_inputs
from swell.worker.block_tables import BlockTables
from swell.worker.request_states import RequestStates
from swell.worker.staging import all_to_device
from swell.worker.wire import SchedulerOutput


@dataclass(frozen=True, slots=True)
class InputBatch:
    """R rows, T tokens, S rows that sample."""

    # [T] int64
    input_ids: Tensor
    # [T] int64
    positions: Tensor
    attention: AttentionMetadata
    # [S] int64, index into T of the last token of each row that samples
    logits_indices: Tensor
    # The same: the tokens whose hidden states are wanted in the end; None: of all T
    wanted: Tensor | None
    # [S] int64
    sample_slots: Tensor
    # [S] int64, the position that the drawn token takes
    sample_positions: Tensor
    # [S] int64, host mirrors of the two above
    sample_slots_np: np.ndarray
    sample_positions_np: np.ndarray
    # [S] int64, which rows of the step sample
    sample_rows_np: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_samples(self) -> int:
        return len(self.sample_slots_np)


class BatchBuilder:
    """Builds one batch at a time: its inputs lie where those of the last one lay."""

    def __init__(self, states: RequestStates, blocks: BlockTables, max_tokens: int) -> None:
        """`max_tokens`: of one step."""
        self._states, self._blocks = states, blocks
        # One row and one token more, so that the numbers of samples, rows and tokens differ: that
        # is how a capture tells them apart.
        rows = states.max_rows + 1
        tokens, device = max(max_tokens, rows) + 1, states.token_ids.device
        self.inputs = Inputs.allocate(tokens, rows, blocks.max_blocks, device)
        """Of the largest step; a batch's are the first of them."""

    def build(self, plan: SchedulerOutput) -> InputBatch:
        """The batch of a plan whose new rows and growths have been applied."""
        slots_np = np.array(plan.slots, dtype=np.int64)
        starts_np = np.array(plan.starts, dtype=np.int64)
        counts_np = np.array(plan.num_tokens, dtype=np.int64)
        sample_rows_np = np.array(plan.samples, dtype=bool).nonzero()[0]
        query_start_np = np.zeros(len(slots_np) + 1, dtype=np.int64)
        counts_np.cumsum(out=query_start_np[1:])
        context_np = starts_np + counts_np
        sample_slots_np = slots_np[sample_rows_np]
        sample_positions_np = context_np[sample_rows_np]
        slots, starts, query_start, logits_indices, sample_slots, sample_positions = all_to_device(
            (
                slots_np,
                starts_np,
                query_start_np,
                query_start_np[1:][sample_rows_np] - 1,
                sample_slots_np,
                sample_positions_np,
            ),
            self._states.token_ids.device,
        )
        tokens, block_tokens = int(query_start_np[-1]), self._blocks.block_tokens
        if tokens > len(self.inputs.input_ids):
            raise ValueError(
                f"step {plan.step} has {tokens} tokens, and there is room for "
                f"{len(self.inputs.input_ids)}; the scheduler has lost count"
            )
        max_context = int(context_np.max(initial=0))
        inputs = self.inputs.first(tokens, len(slots_np), -(-max_context // block_tokens))
        gather_inputs(
            slots,
            starts,
            query_start,
            self._states.token_ids,
            self._blocks.tensor,
            block_tokens,
            inputs,
        )
        return InputBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=metadata(inputs, max(plan.num_tokens, default=0), max_context),
            logits_indices=logits_indices,
            wanted=logits_indices if len(sample_rows_np) < tokens else None,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            sample_slots_np=sample_slots_np,
            sample_positions_np=sample_positions_np,
            sample_rows_np=sample_rows_np,
        )


def metadata(inputs: Inputs, max_query_tokens: int, max_context_tokens: int) -> AttentionMetadata:
    """What attention reads of a step's inputs."""
    return AttentionMetadata(
        query_start=inputs.query_start,
        context_tokens=inputs.context_tokens,
        block_table=inputs.block_table,
        slot_mapping=inputs.slot_mapping,
        max_query_tokens=max_query_tokens,
        max_context_tokens=max_context_tokens,
    )
