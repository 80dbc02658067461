"""One step on one worker: apply, build, forward, sample, write.

The order is the point. A drawn token is written to the device's tables in the step that draws it,
so the next step can be prepared and started before the host has read it. Nothing here waits for
the device: results leave as an `AsyncModelRunnerOutput`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from swell.configs.schema import CacheConfig, SchedulerConfig
from swell.worker.block_tables import BlockTables
from swell.worker.dispatch import Agreement, make_dispatch
from swell.worker.failed_rows import NOT_A_ROWS, FailedRows, describe
from swell.worker.feedback import Outbox, make_feedback
from swell.worker.graphs import Head, make_forward
from swell.worker.input_batch import BatchBuilder, InputBatch
from swell.worker.mesh import Mesh
from swell.worker.request_states import RequestStates
from swell.worker.sample.logprobs import make_readers
from swell.worker.sample.sampler import Drawn, Sampler
from swell.worker.sample.stage import Note
from swell.worker.sample.wire import SamplerParams
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, NewRow, SchedulerOutput


class ReadyOutput(AsyncModelRunnerOutput):
    """A result that the host holds already."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


class CopyingOutput(AsyncModelRunnerOutput):
    """What was drawn, on its way from a CUDA device, on a stream of its own: the next step's
    kernels do not stand in the way."""

    def __init__(
        self, output: ModelRunnerOutput, drawn: Drawn, mesh: Mesh, stream: torch.cuda.Stream
    ) -> None:
        """`output` lacks what was drawn."""
        self._output = output
        self._drawn = drawn  # kept until the copy is done
        self._mesh = mesh
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._host = [t.to("cpu", non_blocking=True) for t in drawn.tensors()]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)

    def get_output(self) -> ModelRunnerOutput:
        self._done.synchronize()
        # An aborted collective ends on the device without a word to the host.
        self._mesh.check()
        return self._drawn.fill(self._output, self._host)


def without_wishes(row: NewRow) -> NewRow:
    """The row as its slot can hold it, whatever is asked of its tokens."""
    return replace_fields(row, sampler=SamplerParams(), min_tokens=0, end_token_ids=[])


class ModelRunner:
    """Executes plans in the order in which they come. Every worker of an engine gets each plan.

    `model` is this worker's stage and tensor part (see `worker/models`), its attention layers
    bound to caches. All tensor ranks of the last stage draw the same tokens from the same logits;
    one of them, `is_output_rank`, returns them.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        max_model_len: int,
        device: torch.device,
        model_path: str = "",
    ) -> None:
        """`max_model_len`: tokens of the longest sequence; `model_path`: where the tokenizer is."""
        self.model = model
        self.mesh = mesh
        self.states = RequestStates(scheduler.max_rows, max_model_len, device)
        self.blocks = BlockTables(scheduler.max_rows, max_model_len, cache.block_tokens, device)
        self.failed = FailedRows()
        self.sampler = Sampler(self.states, model.vocab_size, model_path, self.failed, mesh.tensor)
        self.readers = make_readers(model, self.states)
        self.feedback = make_feedback(mesh, self.states)
        self.dispatch = make_dispatch(model, mesh)
        self.batches = BatchBuilder(self.states, self.blocks, scheduler.max_tokens_per_step)
        self._model_step = make_forward(model, self.states, mesh)
        # The engine does not plan further ahead than this, so an older send has been received.
        self._outbox = Outbox(scheduler.steps_in_flight)
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_output_rank(self) -> bool:
        """Whether `execute_model` returns outputs here: one worker of the engine."""
        return self.mesh.is_last_stage and self.mesh.tensor_rank == 0

    @property
    def progress(self) -> int:
        """Grows with what is computed without a call of the model's layers; from any thread."""
        return self._model_step.progress

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Compute one step; None on all workers but the output rank."""
        self.feedback.before_step(plan)
        self._apply(plan)
        agreed = self.dispatch.before_step(plan)
        if not plan.slots:
            self.dispatch.idle_step()
            return self._output(plan, agreed, None)
        batch = self.batches.build(plan)
        reading = [reader for reader in self.readers if reader.reads(plan)]
        if reading or self.mesh.shares_experts:
            batch = replace(batch, all_wanted=True)  # engines have agreed on all tokens
        head = Head.MOST_LIKELY if self.sampler.takes_most_likely(batch) else Head.LOGITS
        hidden = self._forward(batch, head)
        self.feedback.after_forward(batch)
        if hidden is None:
            return None
        notes = [note for reader in reading for note in reader(hidden, batch, plan)]
        return self._output(plan, agreed, self._sample(hidden, batch, head, notes))

    def settle(self) -> None:
        """Take and send what is under way between the stages: every step has been computed, and
        the groups are about to be left."""
        self.feedback.settle()
        self._outbox.settle()

    def _apply(self, plan: SchedulerOutput) -> None:
        """Let new requests take their slots and blocks, and running ones their new blocks."""
        for row in plan.new_rows:
            self.failed.forget(row.slot)
            try:
                self._take_slot(row)
            except NOT_A_ROWS:
                raise
            except Exception as error:
                self.failed.add(row.slot, f"the worker refused it: {describe(error)}")
                self._take_slot(without_wishes(row))
            self.blocks.stage_set(row.slot, row.block_ids)
        for growth in plan.growths:
            self.blocks.stage_append(growth.slot, growth.block_ids)
        self.states.apply()
        self.blocks.apply()

    def _take_slot(self, row: NewRow) -> None:
        """Raises what the row's own data raises: the same on every rank that draws. Its tokens are
        staged last, and once: where a wish is refused, the tokens are as good as any."""
        if self.mesh.is_last_stage:  # the others draw nothing
            self.sampler.take_slot(row)
        for reader in self.readers:
            reader.take_slot(row)
        self.states.stage(row)

    def _forward(self, batch: InputBatch, head: Head) -> Tensor | None:
        """Hidden states of the wanted tokens on the last stage, for this head; on others None, they
        send theirs on."""
        stage, group = self.mesh.stage, self.mesh.pipeline
        intermediate = None
        if not self.mesh.is_first_stage:
            intermediate = self.model.make_empty_intermediate(batch.num_tokens)
            for tensor in intermediate.tensors():
                group.recv(tensor, stage - 1)
        result = self._model_step.hidden(batch, intermediate, head)
        if self.mesh.is_last_stage:
            assert isinstance(result, Tensor)
            return result
        self._outbox.add([group.send(tensor, stage + 1) for tensor in result.tensors()])
        return None

    def _sample(
        self, hidden: Tensor, batch: InputBatch, head: Head, notes: list[Note]
    ) -> Drawn | None:
        """Draw for the rows that sample and write their tokens to the states; None: no row does,
        and there are no notes either."""
        if batch.num_samples == 0:
            nothing = hidden.new_zeros(0, dtype=torch.float32)
            return Drawn(batch, batch.sample_slots, nothing, notes) if notes else None
        result = self._model_step.head(head, hidden, batch)
        if head is Head.MOST_LIKELY:
            drawn = Drawn(batch, *result)
        else:
            drawn = self.sampler(*result, batch)
            self.states.write_sampled(batch.sample_slots, batch.sample_positions, drawn.tokens)
        self.feedback.after_sampling(drawn.tokens)
        drawn.notes += notes
        return drawn

    def _output(
        self, plan: SchedulerOutput, agreed: Agreement, drawn: Drawn | None
    ) -> AsyncModelRunnerOutput | None:
        if not self.is_output_rank:
            return None
        output = ModelRunnerOutput(
            plan.step,
            [],
            agreed.working,
            agreed.pausing,
            agreed.sync_s,
            failed=self.failed.among(plan.slots),
        )
        if drawn is None:
            return ReadyOutput(output)
        if self._copy_stream is not None:
            return CopyingOutput(output, drawn, self.mesh, self._copy_stream)
        return ReadyOutput(drawn.fill(output, drawn.tensors()))
