"""A step, from its ids to what is drawn from, without Python in between.

The Python that calls a layer's operations takes longer than they do with few tokens, and a tenth of
a step with 64 rows. So the first step is captured (see `swell.kernels.graph`) in the largest sizes
that there may be, on the inputs, which stay where they are; every step fills these and replays.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
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


class Head(Enum):
    """What is wanted of the rows that sample, as the model's method that computes it."""

    LOGITS = "compute_logits"
    MOST_LIKELY = "most_likely"

    def of(self, model: Any, hidden: Tensor) -> Tensor:
        result: Tensor = getattr(model, self.value)(hidden)
        return result


class Forward:
    """Hidden states of a batch and what follows from them, by running the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def hidden(
        self, batch: InputBatch, intermediate: IntermediateTensors | None, head: Head
    ) -> Any:
        """Of the wanted tokens on the last stage, else what the next one takes; `head` is what
        will be asked of them."""
        return self._model(batch, intermediate)

    def head(self, head: Head, hidden: Tensor, batch: InputBatch) -> Tensor:
        """What `hidden` gave of the same batch -> [S, vocab] or [S] of its rows that sample"""
        if len(hidden) > batch.num_samples:
            hidden = hidden.index_select(0, batch.logits_indices)
        return head.of(self._model, hidden)

    @property
    def progress(self) -> int:
        """Grows with what is computed without a call of the model; from any thread."""
        return 0


class CapturedForward(Forward):
    """Of a model that is all of its pipeline. What it returns holds until the next call."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._captured: tuple[_Captured, ...] = ()
        """At most one for each head."""
        self._capturable = True
        self._replayed: _Captured | None = None
        self._hidden: Tensor | None = None

    def hidden(
        self, batch: InputBatch, intermediate: IntermediateTensors | None, head: Head
    ) -> Any:
        self._replayed = self._find(batch, head) if _fits(batch) else None
        if self._replayed is None:
            return super().hidden(batch, intermediate, head)
        self._hidden = self._replayed.run(batch)
        return self._hidden

    def head(self, head: Head, hidden: Tensor, batch: InputBatch) -> Tensor:
        replayed = self._replayed
        if replayed is not None and hidden is self._hidden and replayed.gave(head):
            return replayed.results[0][: len(hidden)]
        return super().head(head, hidden, batch)

    @property
    def progress(self) -> int:
        return sum(captured.graph.progress for captured in self._captured)

    def _find(self, batch: InputBatch, head: Head) -> _Captured | None:
        for captured in self._captured:
            if captured.head is head:
                return captured
        if not self._capturable:
            return None
        try:
            captured = _Captured(self._model, batch, head)
        except NotCapturableError:
            self._capturable = False
            return None
        self._captured += (captured,)
        return captured


def _fits(batch: InputBatch) -> bool:
    """Whether hidden states are wanted of the tokens alone that are followed by a drawn one."""
    alone = not batch.all_wanted or batch.num_samples == batch.num_tokens
    return alone and batch.num_samples <= MAX_SAMPLES


class _Captured:
    """The operations up to one head, on inputs that stay, and where results appear."""

    def __init__(self, model: Any, batch: InputBatch, head: Head) -> None:
        """`batch`: any; its inputs lie where those of every step do."""
        self.head = head
        inputs = batch.inputs
        tokens, (rows, blocks) = len(inputs.input_ids), inputs.block_table.shape
        samples = min(MAX_SAMPLES, rows - 1)
        sizes = Sizes(tokens, rows, samples, tokens, blocks * batch.block_tokens)
        largest = replace(batch, sizes=sizes, all_wanted=False)
        device = inputs.input_ids.device.type
        results, self.graph = capture(
            lambda: _compute(model, largest, head), device, tokens, rows, samples
        )
        # [samples, hidden], and what the head gives, if it was captured
        self._hidden, *self.results = results

    def gave(self, head: Head) -> bool:
        return head is self.head and bool(self.results)

    def run(self, batch: InputBatch) -> Tensor:
        """Hidden states [S, hidden]; and the first S rows of the head's result."""
        tokens, rows, samples, *_ = batch.sizes
        self.graph.replay(tokens, rows, samples)
        return self._hidden[:samples]


def _compute(model: Any, batch: InputBatch, head: Head) -> list[Tensor]:
    hidden: Tensor = model(batch, None)
    if head is Head.LOGITS and hidden.dtype != torch.float32:
        return [hidden]  # logits are converted, which is no operation of a column
    return [hidden, head.of(model, hidden)]


def make_forward(model: Any, mesh: Mesh, device: torch.device) -> Forward:
    """Captured where a worker computes without peers."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and can_capture(device.type):
        return CapturedForward(model)
    return Forward(model)
