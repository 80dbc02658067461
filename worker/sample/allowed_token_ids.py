"""The parameter `allowed_token_ids`: no other token is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swell.kernels.bitmask import apply_bitmask
from swell.kernels.host.device_copy import to_device
from swell.worker.sample.logits_processor import BANNED_BIAS, LogitsProcessor
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.wire import NewRequest

NOT_ALLOWED_LOGIT = 1e6 * BANNED_BIAS
"""The logit of all other tokens. It is far below any sum of bans, so that one of the allowed tokens
is sampled even if all of them are banned; it is finite for the same reason as `BANNED_BIAS`."""


class AllowedTokenIds(LogitsProcessor):
    """Keeps a bitmask for each slot on the device: ceil(V / 32) * 4 bytes (19 KB for 152k tokens).

    The table is allocated when the first row with the parameter samples.
    """

    def __init__(self, states: RequestStates, vocab: int) -> None:
        self._max_rows, self._vocab = states.max_rows, vocab
        self._active_slots = SlotSet(states.max_rows)
        # slot -> bitmask, [ceil(V / 32)] int32, for rows that are not in the table yet
        self._staged: dict[int, np.ndarray] = {}
        # [max_rows, ceil(V / 32)] int32
        self._bitmask: Tensor | None = None

    def add_request(self, row: NewRequest) -> None:
        allowed = row.sampler.allowed_token_ids
        mask = packed_bits(allowed, self._vocab) if allowed else None
        self._active_slots.set(row.slot, bool(allowed))
        self._staged.pop(row.slot, None)
        if mask is not None:
            self._staged[row.slot] = mask

    def rows(self, batch: InputBatch) -> np.ndarray:
        return batch.rows_in(self._active_slots)

    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        rows = to_device(rows_np, logits.device)
        bitmask = self._table(logits)[batch.sample_slots[rows]]
        apply_bitmask(logits, bitmask, rows, NOT_ALLOWED_LOGIT)

    def _table(self, logits: Tensor) -> Tensor:
        """Returns the table, after writing the staged rows."""
        device = logits.device
        if self._bitmask is None:
            shape = (self._max_rows, -(-self._vocab // 32))
            self._bitmask = torch.zeros(shape, dtype=torch.int32, device=device)
        if self._staged:
            slots = np.array(list(self._staged), dtype=np.int64)
            masks = np.stack(list(self._staged.values()))
            self._staged.clear()
            self._bitmask.index_copy_(0, to_device(slots, device), to_device(masks, device))
        return self._bitmask


def packed_bits(token_ids: Sequence[int], vocab: int) -> np.ndarray:
    """Returns [ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is set for each token t.

    Raises `ValueError` for a token outside of the vocabulary.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab):
        raise ValueError(f"an allowed token is outside the vocabulary, 0 .. {vocab - 1}")
    bits = np.zeros(-(-vocab // 32) * 32, dtype=bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view("<i4")
