"""Finds the capture of a step's forward pass, and replays it without Python.

With few tokens, the Python that calls a layer's operations takes longer than the operations
themselves; with 64 rows it takes a tenth of a step on a CPU, and most of a step on a GPU. So a step
is captured once (see `swell.kernels.graph`), on input tensors that every step fills before it
replays the captured operations: on a CPU with the largest sizes, on a GPU once for each bucket (see
`buckets.py`). Steps that are not replayed are rounded like replays, so that the bits of a row do
not depend on which of its steps are replayed.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from swell.kernels.graph import NotCapturableError, can_capture, rounding_like_replays, traits
from swell.kernels.inputs import Bucket
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import ComputesLogits, Model, SupportsPP
from swell.worker.step.buckets import MAX_TOKENS, Buckets
from swell.worker.step.captured_steps import (
    CapturedSteps,
    FixedSteps,
    RepeatedSteps,
    capture_sizes,
)
from swell.worker.step.forward import Forward, HeadOutput
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput

_log = logging.getLogger("swell.worker")
MAX_SAMPLES = 128
"""A step with more samples is not captured on a CPU: its Python overhead hardly matters, and its
logits take memory."""


class _Key(NamedTuple):
    """The steps that a capture computes."""

    head: HeadOutput
    has_adapters: bool
    bucket: Bucket | None
    """None: steps of all sizes."""


class CapturedForward(Forward):
    """A forward pass that replays captured operations. All workers of an engine capture and replay
    the same steps in the same order, because operations of their groups are captured, too. If
    engines share experts, this holds for all of their workers: so their captures do not depend on
    the head, which each engine needs by itself.

    Its results are valid until the next call; on a GPU, for operations that are queued before the
    next call. Sampled tokens and their logits, which are copied to the host while the next steps
    are computed, stay valid.
    """

    def __init__(self, model: Model, states: RequestStates, mesh: Mesh) -> None:
        super().__init__(model, states)
        self._mesh = mesh
        self._traits = traits(states.token_ids.device.type)
        self._captured: dict[_Key, FixedSteps] = {}
        self._capturable = True
        self._dropped_progress = 0
        """The operations of the captures that were dropped."""
        self._intermediate: IntermediateTensors | None = None
        """The output of the previous stage in all steps with a bucket."""
        self._replayed: FixedSteps | None = None
        """The capture that computed the last hidden states; None: they were not replayed."""
        self._like_replays = rounding_like_replays(states.token_ids.device.type)
        self._rounding: AbstractContextManager[object] = nullcontext()
        """The context of a step that is not replayed."""

    @property
    def needs_buckets(self) -> bool:
        return self._traits.has_fixed_sizes

    @property
    def captured_heads(self) -> tuple[HeadOutput, ...]:
        if not self._mesh.is_last_stage or self._mesh.shares_experts:
            return (HeadOutput.LOGITS,)  # the capture computes no head
        # Only a capture with `ARGMAX` computes logits, if the sizes are fixed.
        return HeadOutput.ARGMAX, HeadOutput.LOGITS

    def capture(self, batch: InputBatch, head: HeadOutput) -> None:
        self._find(batch, head)

    def reserve(self, batches: BatchBuilder, buckets: Buckets) -> None:
        if self.needs_buckets and self._capturable and not self._captured:
            batch = batches.build(SchedulerOutput(0), buckets.largest_first()[0])
            self.capture(batch, self.captured_heads[0])

    def make_intermediate(self, batch: InputBatch) -> IntermediateTensors:
        received = self._received(batch) if batch.bucket is not None else None
        if received is None:
            return super().make_intermediate(batch)
        return received.first(batch.num_tokens)

    def drop_captures(self) -> None:
        self._dropped_progress = self.progress
        self._captured, self._replayed = {}, None

    def hidden(
        self, batch: InputBatch, intermediate: IntermediateTensors | None, head: HeadOutput
    ) -> Any:
        captured = self._find(batch, head)
        if captured is not None and captured.is_unchecked:
            difference = captured.difference_from_model(batch)
            if difference is not None:
                self._stop_capturing(difference)
                captured = None
        self._replayed = captured if self._fits(batch) else None
        if self._replayed is None:
            computes_torch = captured is not None and captured.computes_torch
            self._rounding = self._like_replays if computes_torch else nullcontext()
            with self._rounding:
                return super().hidden(batch, intermediate, head)
        self._mesh.check()  # a replay would not notice that its groups were aborted
        results = self._replayed.run(batch)
        if not self._traits.is_asynchronous:
            self._mesh.check()  # nor that an operation of its groups has failed
        return results

    def _stop_capturing(self, difference: str) -> None:
        _log.warning(
            "replayed steps differ from the model's (%s), so steps are computed without captures: "
            "they are correct, and slower",
            difference,
        )
        self.drop_captures()
        self._capturable = False

    def take_layer_inputs(self) -> list[Tensor]:
        return self._replayed.layer_inputs if self._replayed else super().take_layer_inputs()

    def head(self, head: HeadOutput, hidden: Tensor, batch: InputBatch) -> list[Tensor]:
        if self._replayed is None:
            with self._rounding:
                return super().head(head, hidden, batch)
        return self._replayed.head_output or super().head(head, hidden, batch)

    @property
    def progress(self) -> int:
        captured = tuple(self._captured.values())
        return self._dropped_progress + sum(each.progress for each in captured)

    def _find(self, batch: InputBatch, head: HeadOutput) -> FixedSteps | None:
        """Returns the capture for the batch, which is made if there is none; None: the batch cannot
        be captured. A capture of all sizes is also returned for batches that it cannot compute,
        because these should be rounded alike."""
        accepts_all = self._traits.accepts_torch or self._mesh.tensor.uses_kernels
        if not self._capturable or not accepts_all:
            return None
        if self._traits.has_fixed_sizes and not self._fits(batch):
            return None
        if head not in self.captured_heads:
            (head,) = self.captured_heads
        key = _Key(head, batch.adapters is not None, batch.bucket)
        if key not in self._captured:
            made = self._capture_steps(batch, key)
            if made is None:
                self._capturable = False
                return None
            self._captured[key] = made
        return self._captured[key]

    def _capture_steps(self, batch: InputBatch, key: _Key) -> FixedSteps | None:
        """Captures the steps of a key; None: they cannot be captured."""
        forward, received = Forward(self._model, self._states), self._received(batch)
        for sizes, other in capture_sizes(batch, MAX_SAMPLES):
            args = forward, batch, sizes, received, key.head, self._traits
            try:
                captured = CapturedSteps(*args, other=other)
                if captured.is_unchecked and self._mesh.tensor.size > 1:
                    # A check would run operations of the group, which other workers may not run.
                    raise NotCapturableError("torch's operations together with those of a group")
            except NotCapturableError as error:
                reason = error
                self._mesh.check()  # the reason may be that the groups were aborted
            else:
                return captured
        _log.info("steps are computed without captures, which is slower: %s", reason)
        has_peers = self._mesh.shares_experts or self._mesh.tensor.size > 1
        return RepeatedSteps(*args) if has_peers and self._traits.has_fixed_sizes else None

    def _received(self, batch: InputBatch) -> IntermediateTensors | None:
        """Returns the tensors for the output of the previous stage in any step with a bucket; None
        on the first stage."""
        if self._mesh.is_first_stage:
            return None
        if self._intermediate is None:
            tokens = min(len(batch.inputs.input_ids), MAX_TOKENS)
            assert isinstance(self._model, SupportsPP), "the model has stages"
            self._intermediate = self._model.make_empty_intermediate(tokens)
        return self._intermediate

    def _fits(self, batch: InputBatch) -> bool:
        """Whether a capture computes the batch."""
        if not batch.is_capturable:
            return False
        if not self._traits.has_fixed_sizes:
            return batch.num_samples <= MAX_SAMPLES
        if batch.bucket is None or batch.adapters is None:
            return batch.bucket is not None
        # `AdaptedTokens` distinguishes tokens from samples by their numbers, which padding may make
        # equal.
        are_equal = batch.bucket.tokens == batch.bucket.samples
        return not are_equal or batch.num_tokens == batch.num_samples


def make_forward(model: Model, states: RequestStates, mesh: Mesh, enforce_eager: bool) -> Forward:
    """Returns a captured forward pass, unless `enforce_eager`, if the backend can capture, and the
    model has its own head; a model that pools needs the hidden states of all tokens. On a CPU, only
    groups whose operations are kernels can be captured."""
    device = states.token_ids.device.type
    if enforce_eager or not isinstance(model, ComputesLogits) or not can_capture(device):
        return Forward(model, states)
    is_one_stage = mesh.pipeline.size == 1 and not mesh.shares_experts
    if not (is_one_stage or traits(device).accepts_torch):
        return Forward(model, states)
    return CapturedForward(model, states, mesh)
