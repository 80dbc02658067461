"""A step that adds one token to each row, from its ids to its logits, without Python in between.

The Python that calls a layer's operations takes longer than they do with few rows, and a tenth of
a step with 64. So the first such step is captured (see `swell.kernels.graph`) for as many rows as
there may be, on inputs that stay where they are; steps fill these and replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.worker.input_batch import InputBatch
from swell.worker.mesh import Mesh
from swell.worker.models.intermediate import IntermediateTensors

MAX_ROWS = 128
"""Beyond it a step's products far outweigh its Python, and its logits take memory."""


class Forward:
    """Hidden states and logits of a batch, by running the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        """Of the wanted tokens on the last stage, else what the next one takes."""
        return self._model(batch, intermediate)

    def logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        """What `hidden` gave of the same batch -> [S, vocab] of its rows that sample"""
        if len(hidden) > batch.num_samples:
            hidden = hidden.index_select(0, batch.logits_indices)
        logits: Tensor = self._model.compute_logits(hidden)
        return logits


class CapturedForward(Forward):
    """Of a model that is all of its pipeline. What it returns holds until the next call."""

    def __init__(self, model: Any, max_rows: int, max_blocks: int) -> None:
        """`max_rows`: of one step; `max_blocks`: of the longest sequence."""
        super().__init__(model)
        self._max_rows = min(max_rows, MAX_ROWS)
        self._max_blocks = max_blocks
        self._captured: _Captured | None = None
        self._capturable = True
        self._hidden: Tensor | None = None

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        if self._capturable and self._captured is None and self._fits(batch):
            self._capture(batch)
        if self._captured is None or not self._fits(batch):
            return super().hidden(batch, intermediate)
        self._hidden = self._captured.run(batch)
        return self._hidden

    def logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        if hidden is self._hidden and self._captured is not None and self._captured.logits:
            return self._captured.logits[0][: len(hidden)]
        return super().logits(hidden, batch)

    def _fits(self, batch: InputBatch) -> bool:
        """Whether each row has one token, and draws the next."""
        return (
            batch.num_tokens == batch.num_samples <= self._max_rows
            and batch.attention.max_query_tokens == 1
        )

    def _capture(self, batch: InputBatch) -> None:
        try:
            self._captured = _Captured(self._model, batch, self._max_rows, self._max_blocks)
        except NotCapturableError:
            self._capturable = False


class _Captured:
    """The inputs that stay, the operations, and where results appear."""

    def __init__(self, model: Any, batch: InputBatch, rows: int, max_blocks: int) -> None:
        """`batch`: any, for its types."""
        meta = batch.attention
        self._attention = meta._replace(
            query_start=torch.arange(rows + 1, dtype=meta.query_start.dtype),
            context_tokens=meta.context_tokens.new_zeros(rows),
            block_table=meta.block_table.new_zeros(rows, max_blocks),
            slot_mapping=meta.slot_mapping.new_zeros(rows),
        )
        self._batch = replace(
            batch,
            input_ids=batch.input_ids.new_zeros(rows),
            positions=batch.positions.new_zeros(rows),
            attention=self._attention,
        )
        results, self._graph = capture(
            lambda: self._compute(model), meta.block_table.device.type, rows
        )
        # [rows, hidden], [rows, vocab]
        self._hidden, *self.logits = results

    def _compute(self, model: Any) -> list[Tensor]:
        hidden: Tensor = model(self._batch, None)
        # Of other types logits are converted, which is no operation of a column.
        exact = hidden.dtype == torch.float32
        return [hidden, model.compute_logits(hidden)] if exact else [hidden]

    def run(self, batch: InputBatch) -> Tensor:
        """Hidden states [T, hidden]; and the first T rows of `logits`."""
        rows, meta = batch.num_tokens, batch.attention
        self._batch.input_ids[:rows] = batch.input_ids
        self._batch.positions[:rows] = batch.positions
        self._attention.context_tokens[:rows] = meta.context_tokens
        self._attention.slot_mapping[:rows] = meta.slot_mapping
        self._attention.block_table[:rows, : meta.block_table.shape[1]] = meta.block_table
        self._graph.replay(rows)
        return self._hidden[:rows]


def make_forward(
    model: Any, mesh: Mesh, max_rows: int, max_blocks: int, device: torch.device
) -> Forward:
    """Captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(device.type):
        return CapturedForward(model, max_rows, max_blocks)
    return Forward(model)
