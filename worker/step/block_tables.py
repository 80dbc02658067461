"""The KV blocks of each slot, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swell.worker.step.staging import StagedTable


class BlockTables:
    """[max_rows, max_blocks] on the device: entry b of a slot's row is the block of positions b *
    block_tokens .. (b + 1) * block_tokens - 1."""

    def __init__(
        self, max_rows: int, max_model_len: int, block_tokens: int, device: torch.device
    ) -> None:
        self.block_tokens = block_tokens
        # One position more than the longest sequence, as in `RequestStates.token_ids`.
        self.max_blocks = max_model_len // block_tokens + 1
        self._table = StagedTable(max_rows, self.max_blocks, torch.int32, device)
        # [max_rows], on the host: the number of blocks of each slot
        self.counts_np = np.zeros(max_rows, dtype=np.int64)

    @property
    def tensor(self) -> Tensor:
        """[max_rows, max_blocks] int32; entries after a slot's blocks are stale."""
        return self._table.tensor

    def stage_set(self, slot: int, block_ids: Sequence[int]) -> None:
        """Replaces the slot's blocks at the next `apply`."""
        self.counts_np[slot] = 0
        self.stage_append(slot, block_ids)

    def stage_append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Appends to the slot's blocks at the next `apply`."""
        count = int(self.counts_np[slot])
        if count + len(block_ids) > self.max_blocks:
            raise ValueError(
                f"slot {slot}: {count} + {len(block_ids)} blocks exceed the {self.max_blocks} "
                "that a sequence of max_model_len tokens needs: the scheduler has lost count"
            )
        self._table.stage(slot, count, block_ids)
        self.counts_np[slot] = count + len(block_ids)

    def apply(self) -> None:
        """Copies the staged blocks to the device."""
        self._table.apply()
