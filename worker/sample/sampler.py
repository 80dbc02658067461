"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swell.kernels.sample import greedy_tokens, sample_tokens, uniform_noise
from swell.worker.input_batch import InputBatch
from swell.worker.request_states import (
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RequestStates,
)
from swell.worker.staging import to_device


class Sampler:
    """Draws one token for each row that samples.

    What no row of the batch asks for is not computed; the host knows that without a look at the
    device. The noise of a token is a function of the request's seed and of the position that the
    token takes, so preemption, failover and the batch change nothing.
    """

    def __call__(self, logits: Tensor, batch: InputBatch, states: RequestStates) -> Tensor:
        """logits [S, V] float32 (may be changed in place) -> tokens [S] int64."""
        slots_np = batch.sample_slots_np
        self._forbid_ends(logits, batch, states)
        if states.greedy_np[slots_np].all():
            return greedy_tokens(logits)
        slots = batch.sample_slots
        reals, integers = states.reals[slots], states.integers[slots]
        drawing = ~states.greedy_np[slots_np]
        return sample_tokens(
            logits,
            reals[:, TEMPERATURE],
            integers[:, TOP_K],
            reals[:, TOP_P],
            reals[:, MIN_P],
            uniform_noise(integers[:, SEED], batch.sample_positions),
            any_min_p=bool((drawing & states.uses_min_p_np[slots_np]).any()),
            any_top=bool((drawing & states.uses_top_np[slots_np]).any()),
        )

    def _forbid_ends(self, logits: Tensor, batch: InputBatch, states: RequestStates) -> None:
        """Take the end tokens from rows that have not reached their `min_tokens`."""
        early = batch.sample_positions_np < states.end_allowed_np[batch.sample_slots_np]
        if not early.any():
            return
        rows: list[int] = []
        tokens: list[int] = []
        for row in np.flatnonzero(early).tolist():
            ends = states.end_token_ids[batch.sample_slots_np[row]]
            tokens.extend(ends)
            rows.extend([row] * len(ends))
        index = to_device(np.array([rows, tokens], dtype=np.int64), logits.device)
        logits[index[0], index[1]] = -torch.inf
