"""One step on one worker: apply, build, forward, sample, write.

The order is the point. A drawn token is written to the device's tables in the step that draws it,
so the next step can be prepared and started before the host has read it. Nothing here waits for
the device: results leave as an `AsyncModelRunnerOutput`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from swell.configs.schema import CacheConfig, SchedulerConfig
from swell.worker.block_tables import BlockTables
from swell.worker.dispatch import Agreement, make_dispatch
from swell.worker.feedback import Outbox, make_feedback
from swell.worker.input_batch import InputBatch, build_batch
from swell.worker.mesh import Mesh
from swell.worker.request_states import RequestStates
from swell.worker.sample.sampler import Sampler
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput


class ReadyOutput(AsyncModelRunnerOutput):
    """A result that the host holds already."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


class CopyingOutput(AsyncModelRunnerOutput):
    """Tokens on their way from a CUDA device, on a stream of their own: the next step's kernels
    do not stand in the way."""

    def __init__(
        self, output: ModelRunnerOutput, tokens: Tensor, mesh: Mesh, stream: torch.cuda.Stream
    ) -> None:
        """`output` lacks the tokens."""
        self._output = output
        self._tokens = tokens  # kept until the copy is done
        self._mesh = mesh
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            self._host = tokens.to("cpu", non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)

    def get_output(self) -> ModelRunnerOutput:
        self._done.synchronize()
        # An aborted collective ends on the device without a word to the host.
        self._mesh.check()
        return msgspec.structs.replace(self._output, sampled_token_ids=self._host.tolist())


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
    ) -> None:
        """`max_model_len`: tokens of the longest sequence."""
        self.model = model
        self.mesh = mesh
        self.states = RequestStates(scheduler.max_rows, max_model_len, device)
        self.blocks = BlockTables(scheduler.max_rows, max_model_len, cache.block_tokens, device)
        self.sampler = Sampler()
        self.feedback = make_feedback(mesh, self.states)
        self.dispatch = make_dispatch(model, mesh)
        # The engine does not plan further ahead than this, so an older send has been received.
        self._outbox = Outbox(scheduler.steps_in_flight)
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_output_rank(self) -> bool:
        """Whether `execute_model` returns outputs here: one worker of the engine."""
        return self.mesh.is_last_stage and self.mesh.tensor_rank == 0

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Compute one step; None on all workers but the output rank."""
        self.feedback.before_step(plan)
        self._apply(plan)
        agreed = self.dispatch.before_step(plan)
        if not plan.slots:
            self.dispatch.idle_step()
            return self._output(plan.step, agreed, None)
        batch = build_batch(plan, self.states, self.blocks)
        hidden = self._forward(batch)
        self.feedback.after_forward(batch)
        if hidden is None:
            return None
        return self._output(plan.step, agreed, self._sample(hidden, batch))

    def settle(self) -> None:
        """Take and send what is under way between the stages: every step has been computed, and
        the groups are about to be left."""
        self.feedback.settle()
        self._outbox.settle()

    def _apply(self, plan: SchedulerOutput) -> None:
        """Let new requests take their slots and blocks, and running ones their new blocks."""
        for row in plan.new_rows:
            self.states.stage(row)
            self.blocks.stage_set(row.slot, row.block_ids)
        for growth in plan.growths:
            self.blocks.stage_append(growth.slot, growth.block_ids)
        self.states.apply()
        self.blocks.apply()

    def _forward(self, batch: InputBatch) -> Tensor | None:
        """Hidden states [T, hidden] on the last stage; on others None, they send theirs on."""
        stage, group = self.mesh.stage, self.mesh.pipeline
        intermediate = None
        if not self.mesh.is_first_stage:
            intermediate = self.model.make_empty_intermediate(batch.num_tokens)
            for tensor in intermediate.tensors():
                group.recv(tensor, stage - 1)
        result = self.model(batch, intermediate)
        if self.mesh.is_last_stage:
            assert isinstance(result, Tensor)
            return result
        self._outbox.add([group.send(tensor, stage + 1) for tensor in result.tensors()])
        return None

    def _sample(self, hidden: Tensor, batch: InputBatch) -> Tensor | None:
        """Tokens [S] int64 of the rows that sample, written to the states; None if no row does."""
        if batch.num_samples == 0:
            return None
        logits = self.model.compute_logits(hidden[batch.logits_indices])
        tokens = self.sampler(logits, batch, self.states)
        self.states.write_sampled(batch.sample_slots, batch.sample_positions, tokens)
        self.feedback.after_sampling(tokens)
        return tokens

    def _output(
        self, step: int, agreed: Agreement, tokens: Tensor | None
    ) -> AsyncModelRunnerOutput | None:
        if not self.is_output_rank:
            return None
        output = ModelRunnerOutput(step, [], agreed.working, agreed.pausing, agreed.sync_s)
        if tokens is None:
            return ReadyOutput(output)
        if self._copy_stream is not None:
            return CopyingOutput(output, tokens, self.mesh, self._copy_stream)
        return ReadyOutput(msgspec.structs.replace(output, sampled_token_ids=tokens.tolist()))
