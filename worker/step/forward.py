"""The forward pass of a step, from token ids to logits or argmax, replayed without Python.

With few tokens, the Python that calls a layer's operations takes longer than the operations
themselves; with 64 rows it takes a tenth of a step. So the first step is captured (see
`swell.kernels.graph`) with the largest sizes, on input tensors that every step fills before it
replays the captured operations.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.kernels.inputs import Sizes
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import ComputesLogits, Model, SupportsLayerTaps
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.layer_taps import NO_TAPS
from swell.worker.step.request_states import RequestStates

MAX_SAMPLES = 128
"""A step with more samples is not captured: its Python overhead hardly matters, and its logits take
memory."""


class HeadOutput(Enum):
    """The output of the head for the rows that sample."""

    LOGITS = auto()
    """[S, vocab] float32"""
    ARGMAX = auto()
    """[S] int64, the tokens with the largest logits, which are the sampled tokens and are written
    to the states; and these logits, [S] float32."""


class Forward:
    """Computes the hidden states and the head's output of a batch by calling the model."""

    def __init__(self, model: Model, states: RequestStates) -> None:
        self._model = model
        self._head = model if isinstance(model, ComputesLogits) else None
        self._taps = model.taps if isinstance(model, SupportsLayerTaps) else NO_TAPS
        self._states = states

    def hidden(
        self, batch: InputBatch, intermediate: IntermediateTensors | None, head: HeadOutput
    ) -> Any:
        """Returns the hidden states of `batch.hidden_indices` on the last stage, otherwise the
        input of the next stage. `head`: the output that the next call of `head` will compute."""
        return self._model(batch, intermediate)

    def take_layer_inputs(self) -> list[Tensor]:
        """Returns the captured layer inputs of the last call of `hidden` (see `LayerTaps`)."""
        return self._taps.take()

    def head(self, head: HeadOutput, hidden: Tensor, batch: InputBatch) -> list[Tensor]:
        """Computes the head's output for the rows that sample. `hidden`: the result of the last
        call of `hidden`."""
        assert self._head is not None, "only rows of a model with a head sample"
        if len(hidden) > batch.num_samples:
            hidden = hidden.index_select(0, batch.logits_indices)
        if head is HeadOutput.LOGITS:
            return [self._head.compute_logits(hidden)]
        tokens, max_logits = self._head.argmax(hidden)
        self._states.write_sampled(batch.sample_slots, batch.sample_positions, tokens)
        return [tokens, max_logits]

    @property
    def progress(self) -> int:
        """Number of operations computed without calling the model. May be read from any thread."""
        return 0


class CapturedForward(Forward):
    """A forward pass that replays captured operations, for a model with a single pipeline stage.
    Its results are valid until the next call."""

    def __init__(self, model: Model, states: RequestStates) -> None:
        super().__init__(model, states)
        self._captured: tuple[_Captured, ...] = ()
        """At most two captures for each `HeadOutput`: with and without adapters."""
        self._capturable = True
        self._replayed: _Captured | None = None
        """The capture that computed the last hidden states; None: they were not replayed."""

    def hidden(
        self, batch: InputBatch, intermediate: IntermediateTensors | None, head: HeadOutput
    ) -> Any:
        self._replayed = self._find(batch, head) if _fits(batch) else None
        if self._replayed is None:
            return super().hidden(batch, intermediate, head)
        return self._replayed.run(batch)

    def take_layer_inputs(self) -> list[Tensor]:
        return self._replayed.layer_inputs if self._replayed else super().take_layer_inputs()

    def head(self, head: HeadOutput, hidden: Tensor, batch: InputBatch) -> list[Tensor]:
        replayed = self._replayed.head_output if self._replayed else []
        return replayed or super().head(head, hidden, batch)

    @property
    def progress(self) -> int:
        return sum(captured.graph.progress for captured in self._captured)

    def _find(self, batch: InputBatch, head: HeadOutput) -> _Captured | None:
        for captured in self._captured:
            if captured.head is head and captured.adapted == (batch.adapters is not None):
                return captured
        if not self._capturable:
            return None
        try:
            captured = _Captured(Forward(self._model, self._states), batch, head)
        except NotCapturableError:
            self._capturable = False
            return None
        self._captured += (captured,)
        return captured


def _fits(batch: InputBatch) -> bool:
    """Whether a capture computes what the batch needs: hidden states only of rows that sample, and
    no embeddings in place of tokens."""
    only_samples = not batch.all_hidden or batch.num_samples == batch.num_tokens
    return only_samples and batch.num_samples <= MAX_SAMPLES and batch.prompt_embeds is None


class _Captured:
    """The captured operations for one `HeadOutput`, with or without adapters, and their result
    tensors."""

    def __init__(self, forward: Forward, batch: InputBatch, head: HeadOutput) -> None:
        """`batch`: any batch, since all batches use the same input tensors."""
        self.head, self.adapted = head, batch.adapters is not None
        inputs = batch.inputs
        tokens, (rows, blocks) = len(inputs.input_ids), inputs.block_table.shape
        samples = min(MAX_SAMPLES, inputs.samples.shape[1] - 1)
        samples -= samples == rows  # keeps the three sizes different
        sizes = Sizes(tokens, rows, samples, tokens, blocks * batch.block_tokens)
        adapters = None if batch.adapters is None else batch.adapters._replace(num_tokens=tokens)
        largest = replace(batch, sizes=sizes, all_hidden=False, adapters=adapters)
        device = inputs.input_ids.device.type
        # [samples, hidden]; then [tokens, hidden] for each tapped layer; then the
        # head's output, if it was captured
        self._results, self.graph = capture(
            lambda: self._compute(forward, largest), device, tokens, rows, samples
        )
        self._views: dict[int, list[Tensor]] = {}
        """S -> the first S rows of the results. Where layer inputs are read, every token is a
        sample (see `_fits`)."""
        self.layer_inputs: list[Tensor] = []
        self.head_output: list[Tensor] = []
        """The layer inputs and the head's output of the last `run`."""

    def _compute(self, forward: Forward, batch: InputBatch) -> list[Tensor]:
        hidden: Tensor = forward.hidden(batch, None, self.head)
        inputs = forward.take_layer_inputs()
        self._num_inputs = len(inputs)
        if self.head is HeadOutput.LOGITS and hidden.dtype != torch.float32:
            return [hidden, *inputs]  # no backend operation makes logits float32
        return [hidden, *inputs, *forward.head(self.head, hidden, batch)]

    def run(self, batch: InputBatch) -> Tensor:
        """Replays the operations for a batch. Returns hidden states [S, hidden]."""
        tokens, rows, samples, *_ = batch.sizes
        self.graph.replay(tokens, rows, samples)
        if samples not in self._views:
            self._views[samples] = [result[:samples] for result in self._results]
        hidden, *others = self._views[samples]
        self.layer_inputs, self.head_output = (
            others[: self._num_inputs],
            others[self._num_inputs :],
        )
        return hidden


def make_forward(model: Model, states: RequestStates, mesh: Mesh) -> Forward:
    """Returns a captured forward pass if the worker is the only one of its groups, the backend can
    capture, and the model has its own head; a model that pools needs the hidden states of all
    tokens."""
    alone = mesh.pipeline.size == mesh.tensor.size == mesh.data.size == 1
    if alone and isinstance(model, ComputesLogits) and can_capture(states.token_ids.device.type):
        return CapturedForward(model, states)
    return Forward(model, states)
