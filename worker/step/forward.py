"""The forward pass of a step, from token ids to logits or argmax, replayed without Python.

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
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swell.kernels.graph import (
    NotCapturableError,
    Traits,
    can_capture,
    capture,
    rounding_like_replays,
    traits,
)
from swell.kernels.inputs import Bucket, Sizes
from swell.worker.comm.mesh import Mesh
from swell.worker.model_interfaces import (
    ComputesLogits,
    Model,
    SupportsLayerTaps,
    SupportsPP,
)
from swell.worker.step.buckets import MAX_TOKENS, Buckets
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.step.layer_taps import NO_TAPS
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput

_log = logging.getLogger("swell.worker")
_ROUNDING = {torch.float64: 1e-2, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""How much replayed results may differ from the model's, relative to their mean magnitude. A wrong
operation changes them by more than that."""
MAX_SAMPLES = 128
"""A step with more samples is not captured on a CPU: its Python overhead hardly matters, and its
logits take memory."""


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
        self._captured: dict[_Key, _FixedSteps] = {}
        self._capturable = True
        self._dropped_progress = 0
        """The operations of the captures that were dropped."""
        self._intermediate: IntermediateTensors | None = None
        """The output of the previous stage in all steps with a bucket."""
        self._replayed: _FixedSteps | None = None
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
        if captured is not None and captured.is_unchecked and not captured.equals_model(batch):
            self._stop_capturing()
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

    def _stop_capturing(self) -> None:
        _log.warning(
            "replayed steps differ from the model's, so steps are computed without captures: they "
            "are correct, and slower"
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

    def _find(self, batch: InputBatch, head: HeadOutput) -> _FixedSteps | None:
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
            forward, received = Forward(self._model, self._states), self._received(batch)
            args = forward, batch, received, head, self._traits
            try:
                self._captured[key] = captured = _CapturedSteps(*args)
                if captured.is_unchecked and self._mesh.tensor.size > 1:
                    # A check would run operations of the group, which other workers may not run.
                    raise NotCapturableError("torch's operations together with those of a group")
            except NotCapturableError:
                self._mesh.check()  # the reason may be that the groups were aborted
                has_peers = self._mesh.shares_experts or self._mesh.tensor.size > 1
                if not (has_peers and self._traits.has_fixed_sizes):
                    self._capturable = False
                    return None
                self._captured[key] = _RepeatedSteps(*args)
        return self._captured[key]

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


class _FixedSteps:
    """Computes the steps of one `_Key`, all with the sizes of the key's bucket."""

    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        received: IntermediateTensors | None,
        head: HeadOutput,
        traits: Traits,
    ) -> None:
        """`batch`: that of any step of the bucket, since all its steps use the same input tensors;
        `received`: the output of the previous stage, with at least as many tokens."""
        self._forward, self._head, self._traits = forward, head, traits
        self._computed: IntermediateTensors | None = None
        """The input of the next stage that the model has returned; None on the last stage."""
        self.sizes = sizes = _sizes_of_capture(batch)
        adapters = batch.adapters
        if adapters is not None:
            adapters = adapters._replace(num_tokens=sizes.tokens)
        plan = SchedulerOutput(0)  # the results depend on no plan, and none is kept alive
        self._batch = replace(
            batch, plan=plan, sizes=sizes, all_hidden=False, prompt_embeds=None, adapters=adapters
        )
        self._intermediate = received and received.first(sizes.tokens)
        self._results: list[Tensor] = []
        """[samples, hidden]; then [tokens, hidden] for each tapped layer; then the head's output,
        if it is computed here. Not on the last stage: the tensors for the next one."""
        self._views: dict[int, list[Tensor]] = {}
        """S -> the first S rows of the results. Where layer inputs are read, every token is a
        sample (see `CapturedForward`)."""
        self.layer_inputs: list[Tensor] = []
        self.head_output: list[Tensor] = []
        """The layer inputs and the head's output of the last `run`."""

    @property
    def progress(self) -> int:
        """Number of operations computed without calling the model. May be read from any thread."""
        return 0

    @property
    def computes_torch(self) -> bool:
        """See `Graph.computes_torch`."""
        return False

    @property
    def is_unchecked(self) -> bool:
        """Whether `equals_model` should be called before the first step."""
        return False

    def equals_model(self, batch: InputBatch) -> bool:
        """Computes the batch with the model and with a replay, and returns whether they agree."""
        return True

    def _refresh(self, sizes: Sizes) -> None:
        """Sets the results to those of a step of these sizes."""
        raise NotImplementedError

    def _compute(self) -> list[Tensor]:
        """Calls the model, and returns the results."""
        forward, batch = self._forward, self._batch
        hidden = forward.hidden(batch, self._intermediate, self._head)
        if isinstance(hidden, IntermediateTensors):
            self._computed = hidden
            return hidden.tensors()
        inputs = forward.take_layer_inputs()
        self._num_inputs = len(inputs)
        if self._head is HeadOutput.LOGITS and self._traits.has_fixed_sizes:
            return [hidden, *inputs]  # each bucket would keep its own logits, which are large
        return [hidden, *inputs, *forward.head(self._head, hidden, batch)]

    def run(self, batch: InputBatch) -> Tensor | IntermediateTensors:
        """Computes a batch. Returns hidden states [S, hidden], or the input of the next stage."""
        tokens, _rows, samples, *_ = batch.sizes
        self._refresh(batch.sizes)
        if self._computed is not None:
            return self._computed.with_tensors(self._results).first(tokens)
        if samples not in self._views:
            self._views[samples] = [result[:samples] for result in self._results]
        hidden, *others = self._views[samples]
        inputs = self._num_inputs
        self.layer_inputs, self.head_output = others[:inputs], others[inputs:]
        if self._traits.is_asynchronous:
            self.head_output = [result.clone() for result in self.head_output]
        return hidden


class _CapturedSteps(_FixedSteps):
    """Replays captured operations, whose results are always in the same tensors."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = self._batch.inputs.input_ids.device.type
        self._results, self._graph = capture(self._compute, device, *self.sizes[:3])
        self._is_checked = False

    @property
    def progress(self) -> int:
        return self._graph.progress

    @property
    def computes_torch(self) -> bool:
        return self._graph.computes_torch

    @property
    def is_unchecked(self) -> bool:
        return self._graph.computes_torch and not self._is_checked

    def equals_model(self, batch: InputBatch) -> bool:
        self._is_checked = 0 < batch.num_samples <= self.sizes.samples
        if not self._is_checked:  # there are no results to compare, or not enough room for them
            return True
        # If the step cannot be replayed, only the part that a replay can compute is compared.
        batch = replace(batch, all_hidden=False, prompt_embeds=None)
        forward, head = self._forward, self._head
        hidden = forward.hidden(batch, self._intermediate, head)
        found = [hidden, *forward.take_layer_inputs()]
        found += forward.head(head, hidden, batch)
        replayed: list[Any] = [self.run(batch), *self.layer_inputs, *self.head_output]
        return all(_agree(a[: len(b)], b) for a, b in zip(found, replayed, strict=True))

    def _refresh(self, sizes: Sizes) -> None:
        self._graph.replay(*sizes[:3])


class _RepeatedSteps(_FixedSteps):
    """Calls the model in each step: a capture has failed on this worker, and may have succeeded on
    the other workers of its groups, which compute the bucket's sizes."""

    def _refresh(self, sizes: Sizes) -> None:
        self._results, self._views = self._compute(), {}


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether floats are equal, except for rounding. Integers are not compared: of nearly equal
    logits another one may be the largest, and the logits are compared."""
    if not a.is_floating_point():
        return True
    magnitude = float(a.float().nan_to_num().square().mean().sqrt())
    bound = _ROUNDING[a.dtype] * magnitude + 1e-6
    return torch.allclose(a.float(), b.float(), rtol=0, atol=bound, equal_nan=True)


def _sizes_of_capture(batch: InputBatch) -> Sizes:
    """Returns the sizes with which the steps of the batch's bucket are captured; without a bucket,
    the largest sizes. Their first three numbers differ."""
    inputs = batch.inputs
    rows, blocks = inputs.block_table.shape
    max_context = blocks * batch.block_tokens
    if batch.bucket is not None:
        return Sizes(*batch.bucket, max_context)
    tokens = len(inputs.input_ids)
    samples = min(MAX_SAMPLES, inputs.samples.shape[1] - 1)
    samples -= samples == rows
    return Sizes(tokens, rows, samples, tokens, max_context)


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
