"""Repetition, frequency and presence penalties, with tables of the tokens of each slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.kernels.penalties import apply_penalties, count_tokens
from swell.worker.sample.logits_processor import LogitsProcessor
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.wire import NewRequest


@dataclass(frozen=True, slots=True)
class _Seen:
    """The tokens in prompt and output of each slot with penalties; the rows of other slots are
    undefined. Tokens that are not kept are counted in the last row."""

    # [max_rows + 1, V] int32
    output_counts: Tensor
    # [max_rows + 1, V] bool: in the prompt or the output
    anywhere: Tensor


class Penalties(LogitsProcessor):
    """Applies `kernels/penalties.py` to all rows with penalties.

    The tables take 5 * max_rows * V bytes of the device (195 MB for 256 rows and 152k tokens). They
    are allocated when the first row with penalties samples: most servers, and all stages of a
    pipeline except the last, never allocate them.

    The known tokens of a row are counted from the states in the first step in which it samples:
    nothing was sampled for it before. From then on each token is counted when it is sampled, so the
    cost of a step does not depend on the context.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._active_slots = SlotSet(states.max_rows)
        # [3, max_rows]: repetition, frequency, presence
        self._strengths_np = np.zeros((3, states.max_rows), dtype=np.float32)
        # slot -> (prompt tokens, all known tokens) of rows that are not in the tables yet
        self._staged: dict[int, tuple[int, int]] = {}
        self._seen: _Seen | None = None
        # [M] int64 each: the rows of the step with penalties, and their slots
        self._rows = self._slots = torch.zeros(0, dtype=torch.int64)

    def add_request(self, row: NewRequest) -> None:
        params, slot = row.sampler, row.slot
        strengths = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._staged.pop(slot, None)
        active = strengths != (1, 0, 0)
        self._active_slots.set(slot, active)
        if active:
            self._strengths_np[:, slot] = strengths
            self._staged[slot] = (row.prompt_tokens, len(row.token_ids))

    def rows(self, batch: InputBatch) -> np.ndarray:
        return batch.rows_in(self._active_slots)

    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        self._rows = to_device(rows_np, logits.device)
        self._slots = batch.sample_slots[self._rows]
        strengths = self._strengths_np[:, batch.sample_slots_np[rows_np]]
        seen, slots = self._tables(logits), self._slots
        if batch.drafts is not None:
            seen, slots = _with_drafts(seen, slots, *batch.drafts.before(rows_np))
        apply_penalties(
            logits,
            self._rows,
            slots,
            seen.output_counts,
            seen.anywhere,
            *to_device(strengths, logits.device),
        )

    def on_sampled(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        assert self._seen is not None
        seen, slots = self._seen, self._slots
        if batch.drafts is not None:
            kept = batch.drafts.kept_on_device(tokens)[self._rows]
            slots = torch.where(kept, slots, self._states.max_rows)
        count_tokens(seen.output_counts, seen.anywhere, slots, tokens[self._rows])

    def _tables(self, logits: Tensor) -> _Seen:
        """Returns the tables, after writing the staged slots."""
        if self._seen is None:
            shape, device = (self._states.max_rows + 1, logits.shape[1]), logits.device
            self._seen = _Seen(
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.bool, device=device),
            )
        if self._staged:
            self._fill(self._seen)
            self._staged.clear()
        return self._seen

    def _fill(self, seen: _Seen) -> None:
        """Writes the staged slots. Their tokens are gathered at once: the prompts, then the
        outputs."""
        staged = np.array(list(self._staged), dtype=np.int64)
        prompts, lengths = np.array(list(self._staged.values()), dtype=np.int64).T
        starts = np.concatenate((np.zeros_like(prompts), prompts))
        counts = np.concatenate((prompts, lengths - prompts))
        slots = np.repeat(np.concatenate((staged, staged)), counts)
        positions = np.arange(len(slots)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        packed = to_device(np.concatenate((staged, slots, positions)), seen.anywhere.device)
        row, slot, position = packed.split([len(staged), len(slots), len(positions)])
        token = self._states.token_ids[slot, position].long()
        outputs = int(prompts.sum())  # index of the first output token
        seen.anywhere.index_fill_(0, row, False)
        true = torch.ones((), dtype=torch.bool, device=seen.anywhere.device)
        seen.anywhere.index_put_((slot[:outputs], token[:outputs]), true)
        seen.output_counts.index_fill_(0, row, 0)
        count_tokens(seen.output_counts, seen.anywhere, slot[outputs:], token[outputs:])


def _with_drafts(
    seen: _Seen, slots: Tensor, index: np.ndarray, drafts: np.ndarray
) -> tuple[_Seen, Tensor]:
    """Returns tables of the M samples at `slots`, each with the drafts before it counted, and the
    samples' rows in these tables. index, drafts [P]: as returned by `StepDrafts.before`."""
    if not len(index):
        return seen, slots
    own = _Seen(seen.output_counts[slots], seen.anywhere[slots])
    at, tokens = to_device(np.stack([index, drafts]), slots.device)
    count_tokens(own.output_counts, own.anywhere, at, tokens)
    return own, torch.arange(len(slots), device=slots.device)
