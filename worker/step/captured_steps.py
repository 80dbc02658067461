"""Captures the forward pass of steps, compares a replay with the model, and replays it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import ne
from typing import Any

from torch import Tensor

from swell.kernels.graph import Probe, Traits, capture, compared_with_torch
from swell.kernels.inputs import Sizes
from swell.worker.step.forward import Forward, HeadOutput
from swell.worker.step.input_batch import SPARE, InputBatch
from swell.worker.step.intermediate import IntermediateTensors
from swell.worker.wire import SchedulerOutput


class FixedSteps:
    """Computes the steps of one `_Key`, all with the sizes of the key's bucket."""

    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        sizes: Sizes,
        received: IntermediateTensors | None,
        head: HeadOutput,
        traits: Traits,
    ) -> None:
        """`batch`: that of any step, since all steps use the same input tensors; `received`: the
        output of the previous stage, with at least as many tokens as `sizes`."""
        self._forward, self._head, self._traits = forward, head, traits
        self._computed: IntermediateTensors | None = None
        """The input of the next stage that the model has returned; None on the last stage."""
        self.sizes = sizes
        self._batch = _with_sizes(batch, sizes)
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
        """Whether `difference_from_model` should be called before the first step."""
        return False

    def difference_from_model(self, batch: InputBatch) -> str | None:
        """Computes the batch with the model and with a replay. Returns what differs; None: nothing
        does."""
        return None

    def _refresh(self, sizes: Sizes) -> None:
        """Sets the results to those of a step of these sizes."""
        raise NotImplementedError

    def _compute(self, batch: InputBatch) -> list[Tensor]:
        """Calls the model, and returns the results."""
        forward = self._forward
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


class CapturedSteps(FixedSteps):
    """Replays captured operations, whose results are always in the same tensors."""

    def __init__(self, *args: Any, other: Sizes | None = None) -> None:
        """`other`: sizes with which the operations must be the same; None: the sizes are fixed."""
        super().__init__(*args)
        batch = self._batch
        run = partial(self._compute, batch)
        probe = other and Probe(partial(self._compute, _with_sizes(batch, other)), other[:3])
        device = batch.inputs.input_ids.device.type
        self._results, self._graph = capture(run, device, *self.sizes[:3], probe=probe)
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

    def difference_from_model(self, batch: InputBatch) -> str | None:
        """Each operation is compared with torch by itself: a choice among nearly equal numbers may
        depend on the rounding of all operations before it. The replay has the same bits."""
        self._is_checked = 0 < batch.num_samples <= self.sizes.samples
        if not self._is_checked:  # there are no results to compare, or not enough room for them
            return None
        # If the step cannot be replayed, only the part that a replay can compute is compared.
        batch = replace(batch, all_hidden=False, prompt_embeds=None)
        with compared_with_torch(batch.inputs.input_ids.device.type) as operations:
            found = self._compute(batch)
        if operations.difference is not None:
            return operations.difference
        replayed: list[Any] = [self.run(batch), *self.layer_inputs, *self.head_output]
        pairs = zip(found, replayed, strict=True)
        return None if all(_are_equal(a[: len(b)], b) for a, b in pairs) else "the replay"

    def _refresh(self, sizes: Sizes) -> None:
        self._graph.replay(*sizes[:3])


class RepeatedSteps(FixedSteps):
    """Calls the model in each step: a capture has failed on this worker, and may have succeeded on
    the other workers of its groups, which compute the bucket's sizes."""

    def _refresh(self, sizes: Sizes) -> None:
        self._results, self._views = self._compute(self._batch), {}


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _with_sizes(batch: InputBatch, sizes: Sizes) -> InputBatch:
    """Returns a batch of other sizes, on the same input tensors."""
    adapters = batch.adapters and batch.adapters._replace(num_tokens=sizes.tokens)
    plan = SchedulerOutput(0)  # the results depend on no plan, and none is kept alive
    return replace(
        batch, plan=plan, sizes=sizes, all_hidden=False, prompt_embeds=None, adapters=adapters
    )


_PROBES = ((29, 19, 13), (31, 23, 17), (23, 11, 7), (27, 21, 5))
"""Tokens, rows and samples, small enough for all inputs (see `SPARE`)."""


def capture_sizes(batch: InputBatch, max_samples: int) -> Iterator[tuple[Sizes, Sizes | None]]:
    """Returns sizes with which the steps of the batch's bucket are captured, and others that the
    capture is compared with.

    Without a bucket, the sizes are at least the largest ones, their first three numbers differ, and
    there are several of them: with some, the model cannot be captured, because one of its
    dimensions has the size of the rows.
    """
    inputs = batch.inputs
    rows, blocks = inputs.block_table.shape
    max_context = blocks * batch.block_tokens
    if batch.bucket is not None:
        yield Sizes(*batch.bucket, max_context), None
        return
    rows = rows - SPARE + 1
    tokens = max(len(inputs.input_ids) - SPARE, rows) + 1
    samples = min(max_samples, inputs.samples.shape[1] - SPARE)
    for attempt in range(3):
        largest = tokens + 5 * attempt, rows + 3 * attempt, samples + attempt
        while largest[2] in largest[:2]:
            largest = *largest[:2], largest[2] + 1
        probes = [each for each in _PROBES if all(map(ne, each, largest))]
        yield _sizes(largest, max_context), _sizes(probes[attempt % len(probes)], max_context)


def _sizes(numbers: tuple[int, int, int], max_context: int) -> Sizes:
    return Sizes(*numbers, numbers[0], max_context)
