"""Repetition, frequency and presence penalties, over tables of what each slot has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swell.kernels.penalties import apply_penalties
from swell.worker.input_batch import InputBatch
from swell.worker.request_states import RequestStates
from swell.worker.sample.stage import Stage
from swell.worker.staging import to_device
from swell.worker.wire import NewRow


@dataclass(frozen=True, slots=True)
class _Seen:
    """What stands in prompt and output of each slot that penalizes; of others it says nothing."""

    # [max_rows, V] int32
    output_counts: Tensor
    # [max_rows, V] bool
    in_prompt: Tensor


class Penalties(Stage):
    """What `kernels/penalties.py` says, for all rows that ask for it.

    The tables take 5 * max_rows * V bytes of the device (195 MB for 256 rows of 152k tokens). They
    are made for the first row that penalizes and samples: most servers, and all stages of a
    pipeline but the last, never pay for them.

    What a row brings is counted from the states at the latest in the first step in which it
    samples: nothing has been drawn for it before. From there on each of its tokens is counted as
    it is drawn, so a step costs the same whatever the context.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        # [max_rows]
        self._used_np = np.zeros(states.max_rows, dtype=bool)
        # [max_rows, 3]: repetition, frequency, presence
        self._strengths_np = np.zeros((states.max_rows, 3), dtype=np.float32)
        # slot -> (prompt tokens, all known tokens) of rows that are not in the tables yet
        self._staged: dict[int, tuple[int, int]] = {}
        self._seen: _Seen | None = None
        # [M] int64, the rows of the step that penalize; None: no row does
        self._rows: Tensor | None = None

    def take_slot(self, row: NewRow) -> None:
        wish, slot = row.sampler, row.slot
        strengths = (wish.repetition_penalty, wish.frequency_penalty, wish.presence_penalty)
        self._staged.pop(slot, None)
        self._used_np[slot] = strengths != (1, 0, 0)
        if self._used_np[slot]:
            self._strengths_np[slot] = strengths
            self._staged[slot] = (row.prompt_tokens, len(row.token_ids))

    def apply(self, logits: Tensor, batch: InputBatch) -> None:
        self._rows = None
        rows_np = np.flatnonzero(self._used_np[batch.sample_slots_np])
        if not len(rows_np):
            return
        self._rows = to_device(rows_np, logits.device)
        strengths = self._strengths_np[batch.sample_slots_np[rows_np]]
        seen = self._tables(logits)
        apply_penalties(
            logits,
            self._rows,
            batch.sample_slots[self._rows],
            seen.output_counts,
            seen.in_prompt,
            *to_device(strengths, logits.device).unbind(1),
        )

    def drawn(self, tokens: Tensor, batch: InputBatch) -> None:
        if self._rows is None:
            return
        assert self._seen is not None
        _count(self._seen.output_counts, batch.sample_slots[self._rows], tokens[self._rows])

    def _tables(self, logits: Tensor) -> _Seen:
        """The tables, with all rows that have taken slots."""
        if self._seen is None:
            shape, device = (self._states.max_rows, logits.shape[1]), logits.device
            self._seen = _Seen(
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.bool, device=device),
            )
        if self._staged:
            self._fill(self._seen)
            self._staged.clear()
        return self._seen

    def _fill(self, seen: _Seen) -> None:
        """Write the staged slots. All their tokens are gathered at once: the prompts, then the
        outputs."""
        taken = np.array(list(self._staged), dtype=np.int64)
        prompts, lengths = np.array(list(self._staged.values()), dtype=np.int64).T
        starts = np.concatenate((np.zeros_like(prompts), prompts))
        counts = np.concatenate((prompts, lengths - prompts))
        slots = np.repeat(np.concatenate((taken, taken)), counts)
        places = np.arange(len(slots)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        packed = to_device(np.concatenate((taken, slots, places)), seen.in_prompt.device)
        row, slot, place = packed.split([len(taken), len(slots), len(places)])
        token = self._states.token_ids[slot, place].long()
        outputs = int(prompts.sum())  # where they begin
        seen.in_prompt.index_fill_(0, row, False)
        seen.in_prompt[slot[:outputs], token[:outputs]] = True
        seen.output_counts.index_fill_(0, row, 0)
        _count(seen.output_counts, slot[outputs:], token[outputs:])


def _count(table: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """table[slots[i], tokens[i]] += 1, for equal pairs too; slots, tokens [N] int64."""
    one = torch.ones((), dtype=table.dtype, device=table.device)
    table.index_put_((slots, tokens), one, accumulate=True)
