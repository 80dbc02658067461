"""What a step reads of the tables: token ids, positions, and where the cache lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels import columns


class Inputs(NamedTuple):
    """Of R rows with T tokens in all."""

    # [T] int64
    input_ids: Tensor
    # [T] int64
    positions: Tensor
    # [R + 1] int32; row r owns the tokens query_start[r] .. query_start[r + 1] - 1
    query_start: Tensor
    # [R] int32, tokens of the row in the cache, those of this step included
    context_tokens: Tensor
    # [R, blocks] int32, rows as far apart as they were allocated
    block_table: Tensor
    # [T] int64, block * block_tokens + offset of each token's K and V
    slot_mapping: Tensor

    @classmethod
    def allocate(cls, tokens: int, rows: int, blocks: int, device: torch.device) -> Inputs:
        """Room for the largest step."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            query_start=zeros(rows + 1, dtype=torch.int32),
            context_tokens=zeros(rows, dtype=torch.int32),
            block_table=zeros(rows, blocks, dtype=torch.int32),
            slot_mapping=zeros(tokens, dtype=torch.int64),
        )

    def first(self, tokens: int, rows: int, blocks: int) -> Inputs:
        """Views of a step's part."""
        return Inputs(
            self.input_ids[:tokens],
            self.positions[:tokens],
            self.query_start[: rows + 1],
            self.context_tokens[:rows],
            self.block_table[:rows, :blocks],
            self.slot_mapping[:tokens],
        )


def gather_inputs(
    slots: Tensor,
    starts: Tensor,
    query_start: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_tokens: int,
    out: Inputs,
) -> None:
    """Fill `out`, which has the step's sizes: row r computes the positions from starts[r] of the
    request at slots[r].

    slots, starts [R] and query_start [R + 1] int64; token_ids [slots, length] int32, of which
    element p is the token at position p; block_table [slots, max_blocks] int32.
    Columns: reference, cpu.
    """
    columns.pick("inputs", token_ids.device.type).gather_inputs(
        slots, starts, query_start, token_ids, block_table, block_tokens, out
    )


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """token_ids[slots[i], positions[i]] = tokens[i]; all [S] int64, and token_ids as in
    `gather_inputs`. Columns: reference, cpu."""
    columns.pick("inputs", token_ids.device.type).write_tokens(token_ids, slots, positions, tokens)
