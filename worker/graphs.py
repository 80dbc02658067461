"""A step with few tokens, from its ids to its logits, without Python in between.

With one or a few rows the operations of a layer take microseconds each, less than the Python that
calls them. So for each small number of tokens the first step is captured (see
`swell.kernels.graph`), on inputs that stay where they are, and later steps fill these and replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.worker.input_batch import InputBatch
from swell.worker.mesh import Mesh
from swell.worker.models.intermediate import IntermediateTensors

MAX_TOKENS = 16
"""Beyond it a step's products outweigh its Python."""


class Forward:
    """Hidden states and logits of a batch, by running the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        """[T, hidden] on the last stage, else what the next one takes."""
        return self._model(batch, intermediate)

    def logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        """hidden [T, hidden] of the same batch -> [S, vocab] of its rows that sample"""
        logits: Tensor = self._model.compute_logits(hidden.index_select(0, batch.logits_indices))
        return logits


class CapturedForward(Forward):
    """Of a model that is all of its pipeline. What it returns holds until the next call."""

    def __init__(self, model: Any, max_blocks: int) -> None:
        """`max_blocks`: of the longest sequence."""
        super().__init__(model)
        self._max_blocks = max_blocks
        self._captured: dict[int, _Captured] = {}
        self._capturable = True

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        if not self._capturable or not _fits(batch):
            return super().hidden(batch, intermediate)
        captured = self._captured.get(batch.num_tokens)
        if captured is None:
            return self._capture(batch)
        return captured.run(batch)

    def logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        captured = self._captured.get(batch.num_tokens)
        if captured is not None and captured.hidden is hidden and captured.logits is not None:
            return captured.logits
        return super().logits(hidden, batch)

    def _capture(self, batch: InputBatch) -> Any:
        try:
            captured = _Captured(self._model, batch, self._max_blocks)
        except NotCapturableError:
            self._capturable = False
            return super().hidden(batch, None)
        self._captured[batch.num_tokens] = captured
        return captured.hidden


def _fits(batch: InputBatch) -> bool:
    """Whether each of a few rows has one token, and draws the next."""
    return (
        batch.num_tokens == batch.num_samples <= MAX_TOKENS
        and batch.attention.max_query_tokens == 1
    )


class _Captured:
    """Of one number of tokens: the inputs that stay, the operations, and where results appear."""

    def __init__(self, model: Any, batch: InputBatch, max_blocks: int) -> None:
        meta = batch.attention
        table = meta.block_table.new_zeros(batch.num_tokens, max_blocks)
        self._attention = meta._replace(
            query_start=meta.query_start.clone(),
            context_tokens=meta.context_tokens.clone(),
            block_table=table,
            slot_mapping=meta.slot_mapping.clone(),
        )
        self._batch = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            attention=self._attention,
        )
        self._fill(batch)
        (self.hidden, self.logits), self._graph = capture(
            lambda: self._compute(model), table.device.type
        )

    def _compute(self, model: Any) -> tuple[Tensor, Tensor | None]:
        hidden: Tensor = model(self._batch, None)
        # Of other types logits are converted, which is no operation of a column.
        exact = hidden.dtype == torch.float32
        return hidden, model.compute_logits(hidden) if exact else None

    def run(self, batch: InputBatch) -> Tensor:
        self._fill(batch)
        self._graph.replay()
        return self.hidden

    def _fill(self, batch: InputBatch) -> None:
        """Rows have one token each, so `query_start` stays."""
        meta: AttentionMetadata = batch.attention
        self._batch.input_ids.copy_(batch.input_ids)
        self._batch.positions.copy_(batch.positions)
        self._attention.context_tokens.copy_(meta.context_tokens)
        self._attention.slot_mapping.copy_(meta.slot_mapping)
        self._attention.block_table[:, : meta.block_table.shape[1]].copy_(meta.block_table)


def make_forward(model: Any, mesh: Mesh, max_blocks: int, device: torch.device) -> Forward:
    """Captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(device.type):
        return CapturedForward(model, max_blocks)
    return Forward(model)
