"""The tensors of one step, from the scheduler's columns.

One flat batch, and no padding: with rows of 1, 1 and 3 tokens,

    token            0     1     2  3  4
    row              0     1     2  2  2
    query_start      0     1     2        5
    positions        s0    s1    s2 s2+1 s2+2      (s: the row's start)
    logits_indices   0     1           4           (of the rows that sample)

Indices are made on the host with numpy and reach the device in one copy; token ids are looked
up on the device, where a token drawn by the previous step already stands, and so are blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
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


@dataclass(frozen=True, slots=True)
class _HostIndices:
    """The columns of a plan as arrays, one element per row, token or sample."""

    slots: np.ndarray  # [R]
    context: np.ndarray  # [R]
    query_start: np.ndarray  # [R + 1]
    token_slots: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    logits_indices: np.ndarray  # [S]
    sample_slots: np.ndarray  # [S]
    sample_positions: np.ndarray  # [S]
    sample_rows: np.ndarray  # [S]
    max_query_tokens: int


def build_batch(plan: SchedulerOutput, states: RequestStates, blocks: BlockTables) -> InputBatch:
    """The batch of a plan whose new rows and growths have been applied."""
    host = _host_indices(plan)
    (
        slots,
        places,
        positions,
        slot_mapping,
        logits_indices,
        sample_slots,
        sample_positions,
        context,
        query_start,
    ) = all_to_device(
        (
            host.slots,
            states.places(host.token_slots, host.positions),
            host.positions,
            blocks.slot_mapping(host.token_slots, host.positions),
            host.logits_indices,
            host.sample_slots,
            host.sample_positions,
            host.context,
            host.query_start,
        ),
        states.token_ids.device,
    )
    max_context = int(host.context.max(initial=0))
    attention = AttentionMetadata(
        query_start=query_start.int(),
        context_tokens=context.int(),
        block_table=blocks.gather(slots, max_context),
        slot_mapping=slot_mapping,
        max_query_tokens=host.max_query_tokens,
        max_context_tokens=max_context,
    )
    return InputBatch(
        input_ids=states.tokens_at(places),
        positions=positions,
        attention=attention,
        logits_indices=logits_indices,
        wanted=logits_indices if len(host.sample_slots) < len(host.positions) else None,
        sample_slots=sample_slots,
        sample_positions=sample_positions,
        sample_slots_np=host.sample_slots,
        sample_positions_np=host.sample_positions,
        sample_rows_np=host.sample_rows,
    )


def _host_indices(plan: SchedulerOutput) -> _HostIndices:
    slots = np.array(plan.slots, dtype=np.int64)
    starts = np.array(plan.starts, dtype=np.int64)
    counts = np.array(plan.num_tokens, dtype=np.int64)
    samples = np.array(plan.samples, dtype=bool)
    query_start = np.zeros(len(slots) + 1, dtype=np.int64)
    query_start[1:] = counts.cumsum()
    context = starts + counts
    # Position of a token = its index in the batch, less the row's first index, plus its start.
    shift = (starts - query_start[:-1]).repeat(counts)
    return _HostIndices(
        slots=slots,
        context=context,
        query_start=query_start,
        token_slots=slots.repeat(counts),
        positions=np.arange(len(shift), dtype=np.int64) + shift,
        logits_indices=(query_start[1:] - 1)[samples],
        sample_slots=slots[samples],
        sample_positions=context[samples],
        sample_rows=samples.nonzero()[0],
        max_query_tokens=max(plan.num_tokens, default=0),
    )
