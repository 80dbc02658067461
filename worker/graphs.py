"""The forward of a step with few tokens, captured: its operations run without Python in between.

With one or a few rows the operations of a layer take microseconds each, less than the Python that
calls them. So for each small number of tokens the first step is captured (see
`swell.kernels.graph`), on inputs that stay where they are, and later steps fill these and replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.graph import Graph, NotCapturableError, can_capture, capture
from swell.worker.input_batch import InputBatch
from swell.worker.mesh import Mesh
from swell.worker.models.intermediate import IntermediateTensors

MAX_TOKENS = 16
"""Beyond it a step's products outweigh its Python."""


Forward = Callable[[InputBatch, IntermediateTensors | None], Any]
"""What a model is, for those that run it."""


class CapturedForward:
    """Runs a model that is all of its pipeline; replays steps in which a few rows have one token
    each."""

    def __init__(self, model: Forward, max_blocks: int) -> None:
        """`max_blocks`: of the longest sequence."""
        self._model = model
        self._max_blocks = max_blocks
        self._captured: dict[int, _Captured] = {}
        self._capturable = True

    def __call__(self, batch: InputBatch, intermediate: IntermediateTensors | None) -> Any:
        """Hidden states [T, hidden]; they hold until the next call."""
        tokens = batch.num_tokens
        if not self._capturable or tokens > MAX_TOKENS or batch.attention.max_query_tokens > 1:
            return self._model(batch, intermediate)
        captured = self._captured.get(tokens)
        if captured is None:
            return self._capture(batch)
        return captured.run(batch)

    def _capture(self, batch: InputBatch) -> Any:
        try:
            captured = _Captured(self._model, batch, self._max_blocks)
        except NotCapturableError:
            self._capturable = False
            return self._model(batch, None)
        self._captured[batch.num_tokens] = captured
        return captured.hidden


class _Captured:
    """Of one number of tokens: the inputs that stay, the operations, and where results appear."""

    def __init__(self, model: Forward, batch: InputBatch, max_blocks: int) -> None:
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
        self._graph: Graph
        self.hidden, self._graph = capture(lambda: model(self._batch, None), table.device.type)

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
    """The model, captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(device.type):
        return CapturedForward(model, max_blocks)
    forward: Forward = model
    return forward
