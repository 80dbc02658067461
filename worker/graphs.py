"""A step, from its ids to its logits, without Python in between.

The Python that calls a layer's operations takes longer than they do with few tokens, and a tenth of
a step with 64 rows. So the first step is captured (see `swell.kernels.graph`) in the largest sizes
that there may be, on the inputs, which stay where they are; every step fills these and replays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.kernels.inputs import Sizes
from swell.worker.input_batch import InputBatch
from swell.worker.mesh import Mesh
from swell.worker.models.intermediate import IntermediateTensors

MAX_SAMPLES = 128
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

    @property
    def progress(self) -> int:
        """Grows with what is computed without a call of the model; from any thread."""
        return 0


class CapturedForward(Forward):
    """Of a model that is all of its pipeline. What it returns holds until the next call."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._captured: _Captured | None = None
        self._capturable = True
        self._hidden: Tensor | None = None

    def hidden(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        if not _fits(batch):
            return super().hidden(batch, intermediate)
        if self._captured is None and self._capturable:
            self._capture(batch)
        if self._captured is None:
            return super().hidden(batch, intermediate)
        self._hidden = self._captured.run(batch)
        return self._hidden

    def logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        if hidden is self._hidden and self._captured is not None and self._captured.logits:
            return self._captured.logits[0][: len(hidden)]
        return super().logits(hidden, batch)

    @property
    def progress(self) -> int:
        return self._captured.graph.progress if self._captured is not None else 0

    def _capture(self, batch: InputBatch) -> None:
        try:
            self._captured = _Captured(self._model, batch)
        except NotCapturableError:
            self._capturable = False


def _fits(batch: InputBatch) -> bool:
    """Whether hidden states are wanted of the tokens alone that are followed by a drawn one."""
    alone = not batch.all_wanted or batch.num_samples == batch.num_tokens
    return alone and batch.num_samples <= MAX_SAMPLES


class _Captured:
    """The operations, on inputs that stay, and where results appear."""

    def __init__(self, model: Any, batch: InputBatch) -> None:
        """`batch`: any; its inputs lie where those of every step do."""
        inputs = batch.inputs
        tokens, (rows, blocks) = len(inputs.input_ids), inputs.block_table.shape
        samples = min(MAX_SAMPLES, rows - 1)
        sizes = Sizes(tokens, rows, samples, tokens, blocks * batch.block_tokens)
        largest = replace(batch, sizes=sizes, all_wanted=False)
        device = inputs.input_ids.device.type
        results, self.graph = capture(
            lambda: _compute(model, largest), device, tokens, rows, samples
        )
        # [samples, hidden], [samples, vocab]
        self._hidden, *self.logits = results

    def run(self, batch: InputBatch) -> Tensor:
        """Hidden states [S, hidden]; and the first S rows of `logits`."""
        tokens, rows, samples, *_ = batch.sizes
        self.graph.replay(tokens, rows, samples)
        return self._hidden[:samples]


def _compute(model: Any, batch: InputBatch) -> list[Tensor]:
    hidden: Tensor = model(batch, None)
    # Of other types logits are converted, which is no operation of a column.
    exact = hidden.dtype == torch.float32
    return [hidden, model.compute_logits(hidden)] if exact else [hidden]


def make_forward(model: Any, mesh: Mesh, device: torch.device) -> Forward:
    """Captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(device.type):
        return CapturedForward(model)
    return Forward(model)
