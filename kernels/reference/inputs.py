"""A step's inputs in plain torch, without a look at the device."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.inputs import Inputs


def gather_inputs(
    slots: Tensor,
    starts: Tensor,
    query_start: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_tokens: int,
    out: Inputs,
) -> None:
    """See `swell.kernels.inputs.gather_inputs`."""
    tokens, blocks = len(out.input_ids), out.block_table.shape[1]
    counts = query_start.diff()
    # [T]: the row of each token
    rows = torch.arange(len(slots), device=slots.device).repeat_interleave(
        counts, output_size=tokens
    )
    positions = torch.arange(tokens, device=slots.device) + (starts - query_start[:-1])[rows]
    tables = block_table[:, :blocks].index_select(0, slots)
    out.input_ids.copy_(token_ids[slots[rows], positions])
    out.positions.copy_(positions)
    out.query_start.copy_(query_start)
    out.context_tokens.copy_(starts + counts)
    out.block_table.copy_(tables)
    index, offset = positions // block_tokens, positions % block_tokens
    out.slot_mapping.copy_(tables[rows, index].long() * block_tokens + offset)


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.inputs.write_tokens`."""
    token_ids.index_put_((slots, positions), tokens.int())
