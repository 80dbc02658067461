"""The worker's state of each request, in a fixed slot of device tables.

Tokens are kept on the device: a sampled token is written there, and the next step reads it there
before the host has seen it. The host keeps only sets of slots, from which it decides what work a
batch can skip.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swell.kernels.inputs import write_tokens
from swell.worker.step.slot_set import SlotSet
from swell.worker.step.staging import StagedTable
from swell.worker.wire import NewRequest, SchedulerOutput

# Columns of `RequestStates.float_params`, and of `RequestStates.int_params`.
TEMPERATURE, TOP_P, MIN_P = range(3)
TOP_K, SEED, PROMPT_TOKENS = range(3)


class RequestStates:
    """Slots 0 .. max_rows - 1; a slot keeps its content until a `NewRequest` takes it."""

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        # One column more than the longest sequence, for the token sampled after its last position.
        self._tokens = StagedTable(max_rows, max_model_len + 1, torch.int32, device)
        self._float_params = StagedTable(max_rows, 3, torch.float32, device)
        self._int_params = StagedTable(max_rows, 3, torch.int64, device)
        # Requests with temperature > 0, and the subset of them that uses top_k or top_p
        self.random_sampling = SlotSet(max_rows)
        self.with_top_k_or_p = SlotSet(max_rows)

    @property
    def token_ids(self) -> Tensor:
        """[max_rows, max_model_len + 1] int32: the prompt, then the outputs."""
        return self._tokens.tensor

    @property
    def float_params(self) -> Tensor:
        """[max_rows, 3] float32: columns TEMPERATURE, TOP_P, MIN_P."""
        return self._float_params.tensor

    @property
    def int_params(self) -> Tensor:
        """[max_rows, 3] int64: columns TOP_K, SEED, PROMPT_TOKENS."""
        return self._int_params.tensor

    @property
    def prompt_tokens(self) -> Tensor:
        """[max_rows] int64, number of tokens of the prompt only."""
        return self.int_params[:, PROMPT_TOKENS]

    def stage(self, row: NewRequest) -> None:
        """Puts a request into its slot at the next `apply`. Raises what the request's own data
        raises, and then stages nothing."""
        if len(row.token_ids) > self.max_model_len:
            raise ValueError(
                f"slot {row.slot}: {len(row.token_ids)} tokens exceed the worker's "
                f"max_model_len={self.max_model_len}; shorten the request or raise "
                "model.max_model_len"
            )
        slot, sampler = row.slot, row.sampler
        float_params = (sampler.temperature, sampler.top_p, sampler.min_p)
        int_params = np.array((sampler.top_k, _signed(sampler.seed), row.prompt_tokens), "i8")
        self._tokens.stage(slot, 0, row.token_ids)
        self._float_params.stage(slot, 0, float_params)
        self._int_params.stage(slot, 0, int_params)
        is_random = sampler.temperature > 0
        self.random_sampling.set(slot, is_random)
        self.with_top_k_or_p.set(slot, is_random and (sampler.top_k > 0 or sampler.top_p < 1))

    def stage_drafts(self, plan: SchedulerOutput) -> None:
        """Writes the drafts of a step to their positions at the next `apply`."""
        for row, tokens in plan.drafts.items():
            end = plan.starts[row] + plan.num_tokens[row]
            self._tokens.stage(plan.slots[row], end - len(tokens), tokens)

    def apply(self) -> None:
        """Copies the staged rows to the device."""
        self._tokens.apply()
        self._float_params.apply()
        self._int_params.apply()

    def write_sampled(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Sets token_ids[slots[i], positions[i]] = tokens[i]; all [S] int64 on the device."""
        write_tokens(self.token_ids, slots, positions, tokens)


def _signed(seed: int) -> int:
    """Returns the int64 with the low 64 bits of a seed."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
