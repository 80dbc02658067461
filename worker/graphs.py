"""A step that adds one token to each row, from its ids to its logits, without Python in between.

The Python that calls a layer's operations takes longer than they do with few rows, and a tenth of
a step with 64. So the first such step is captured (see `swell.kernels.graph`) for as many rows as
there may be, on the inputs, which stay where they are; steps fill these and replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.kernels.inputs import Inputs
from swell.worker.input_batch import InputBatch, metadata
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

    def __init__(self, model: Any, inputs: Inputs) -> None:
        """`inputs`: of the largest step, where those of every step lie."""
        super().__init__(model)
        self._inputs = inputs
        self._max_rows = min(len(inputs.context_tokens), len(inputs.input_ids), MAX_ROWS)
        self._captured: _Captured | None = None
        self._capturable = True
        self._hidden: Tensor | None = None

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        if self._capturable and self._captured is None and self._fits(batch):
            self._capture(batch)
        if self._captured is None or not self._fits(batch):
            return super().hidden(batch, intermediate)
        self._hidden = self._captured.run(batch.num_tokens)
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
            self._captured = _Captured(self._model, batch, self._inputs, self._max_rows)
        except NotCapturableError:
            self._capturable = False


class _Captured:
    """The operations, on inputs that stay, and where results appear."""

    def __init__(self, model: Any, batch: InputBatch, inputs: Inputs, rows: int) -> None:
        """`batch`: any of those that fit."""
        inputs = inputs.first(rows, rows, inputs.block_table.shape[1])
        batch = replace(
            batch,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=metadata(inputs, 1, batch.attention.max_context_tokens),
        )
        device = inputs.input_ids.device.type
        results, self._graph = capture(lambda: _compute(model, batch), device, rows)
        # [rows, hidden], [rows, vocab]
        self._hidden, *self.logits = results

    def run(self, rows: int) -> Tensor:
        """Hidden states [rows, hidden]; and the first rows of `logits`."""
        self._graph.replay(rows)
        return self._hidden[:rows]


def _compute(model: Any, batch: InputBatch) -> list[Tensor]:
    hidden: Tensor = model(batch, None)
    # Of other types logits are converted, which is no operation of a column.
    exact = hidden.dtype == torch.float32
    return [hidden, model.compute_logits(hidden)] if exact else [hidden]


def make_forward(model: Any, mesh: Mesh, inputs: Inputs) -> Forward:
    """Captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(inputs.input_ids.device.type):
        return CapturedForward(model, inputs)
    return Forward(model)
