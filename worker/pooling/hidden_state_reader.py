"""Reads the hidden states of a step for requests that pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.worker.pooling.pooler import ACTIVATIONS, Pooler
from swell.worker.sample.logits_processor import HiddenStatesReader, PendingExtra
from swell.worker.sampler_wire import Activation, Extra, PooledValues, PoolingParams
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import NewRequest, SchedulerOutput


@dataclass(slots=True)
class PendingVectors(PendingExtra):
    """Vectors of the same size, for some rows of a step."""

    # [P, size] float32
    vectors: Tensor
    rows: list[int]

    def to_cpu_nonblocking(self) -> PendingVectors:
        return replace(self, vectors=self.vectors.to("cpu", non_blocking=True))

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        finite = torch.isfinite(self.vectors).all(-1).tolist()
        for row, vector, is_finite in zip(
            self.rows, self.vectors.contiguous().numpy(), finite, strict=True
        ):
            yield (
                row,
                PooledValues(vector.astype("<f4", copy=False).tobytes()) if is_finite else None,
            )


class PoolingReader(HiddenStatesReader):
    """Makes one vector of each prompt, in the step that computes the prompt's last token.

    A prompt may be computed in several steps. Until then, the first hidden state, or the sum of all
    so far, is kept for each slot; a request that takes a slot again starts at its first token.
    """

    def __init__(self, pooler: Pooler, states: RequestStates) -> None:
        self._pooler = pooler
        self._params = [PoolingParams()] * states.max_rows
        # [max_rows]
        self._prompt_tokens_np = np.zeros(states.max_rows, dtype=np.int64)
        # [max_rows, hidden]
        self._kept = torch.zeros(0, device=states.token_ids.device)
        if pooler.spec.method != "last":
            shape = (states.max_rows, pooler.hidden_size)
            self._kept = torch.zeros(shape, device=states.token_ids.device)

    def add_request(self, row: NewRequest) -> None:
        params = row.sampler.pooling or PoolingParams()
        if params.dimensions > self._pooler.out_features:
            limit = self._pooler.out_features
            raise ValueError(f"dimensions={params.dimensions} is above the model's {limit}")
        self._params[row.slot] = params
        self._prompt_tokens_np[row.slot] = row.prompt_tokens
        self._pooler.on_request(row.slot, params)

    def reads(self, plan: SchedulerOutput) -> bool:
        return True

    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        slots = np.array(plan.slots, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        done = np.flatnonzero(starts + counts == self._prompt_tokens_np[slots])
        pooled = self._pool(hidden, slots, starts, counts, done)
        if not len(done):
            return []
        values = self._pooler.head(pooled.to(hidden.dtype))
        groups: dict[tuple[int, Activation], list[int]] = {}
        for index, slot in enumerate(slots[done].tolist()):
            params = self._params[slot]
            groups.setdefault((params.dimensions, params.activation), []).append(index)
        return [
            PendingVectors(self._vectors(values, members, *key), done[members].tolist())
            for key, members in groups.items()
        ]

    def _vectors(
        self, values: Tensor, members: list[int], dimensions: int, activation: Activation
    ) -> Tensor:
        """values [P, out] -> [members, dimensions] float32"""
        if len(members) < len(values):
            values = values[to_device(np.array(members, dtype=np.int64), values.device)]
        return ACTIVATIONS[activation](values[:, :dimensions] if dimensions else values)

    def _pool(
        self,
        hidden: Tensor,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        done: np.ndarray,
    ) -> Tensor:
        """hidden [T, hidden] -> [len(done), hidden] float32, for the rows that are done"""
        device, ends = hidden.device, np.cumsum(counts)
        method = self._pooler.spec.method
        if method == "last":
            return hidden[to_device(ends[done] - 1, device)].float()
        if method == "cls":
            begins = np.flatnonzero(starts == 0)
            firsts = hidden[to_device(ends[begins] - counts[begins], device)].float()
            self._kept[to_device(slots[begins], device)] = firsts
            return self._kept[to_device(slots[done], device)]
        lengths = to_device(counts, device)
        # A check that the lengths add up to all tokens would wait for the device.
        sums = torch.segment_reduce(hidden.float(), "sum", lengths=lengths, axis=0, unsafe=True)
        where, goes_on = to_device(slots, device), to_device(starts > 0, device)[:, None]
        self._kept[where] = sums + torch.where(goes_on, self._kept[where], 0.0)
        totals = to_device((starts + counts)[done], device)
        return self._kept[to_device(slots[done], device)] / totals[:, None]
