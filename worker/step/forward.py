"""The forward pass of a step, from token ids to logits or argmax.

`ModelRunner` calls `hidden` and then `head`. A step that can be replayed goes through these files:

    forward.py            calls the model
    captured_forward.py   finds or makes the capture for a step, and decides whether to replay it
    captured_steps.py     captures the model, compares a replay with it, and replays it
    swell.kernels.graph   records the operations of a call, and repeats them
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torch import Tensor

from swell.worker.model_interfaces import (
    ComputesLogits,
    Model,
    SupportsLayerTaps,
    SupportsPP,
)
from swell.worker.step.buckets import Buckets
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.layer_taps import NO_TAPS
from swell.worker.step.request_states import RequestStates


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
        input of the next stage. `intermediate`: the output of the previous stage, in tensors that
        `make_intermediate` has returned for this batch. `head`: the output that the next call of
        `head` will compute."""
        return self._model(batch, intermediate)

    def make_intermediate(self, batch: InputBatch) -> IntermediateTensors:
        """Returns tensors for the output of the previous stage."""
        assert isinstance(self._model, SupportsPP), "the model has stages"
        return self._model.make_empty_intermediate(batch.num_tokens)

    @property
    def needs_buckets(self) -> bool:
        """Whether only steps that are padded to a bucket can be captured."""
        return False

    @property
    def captured_heads(self) -> tuple[HeadOutput, ...]:
        """The outputs of the head whose steps have captures of their own; the first one's captures
        need the most memory."""
        return ()

    def capture(self, batch: InputBatch, head: HeadOutput) -> None:
        """Captures the steps of the batch's bucket now, if they can be captured, so that the first
        of them need not."""

    def reserve(self, batches: BatchBuilder, buckets: Buckets) -> None:
        """Takes the memory of all captures, if there are none yet: captures the largest step. All
        captures use the same memory, but several parts of it that smaller steps have taken do not
        become one part for a larger step. Builds a batch with `batches`."""

    def drop_captures(self) -> None:
        """Forgets all captures, because they contain operations of groups that are left. Steps are
        captured again when they occur."""

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
