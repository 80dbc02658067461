"""The model runner, which executes one step on one worker: apply, build, forward, sample, write.

The order matters. A sampled token is written to the device's tables in the same step, so the next
step can be prepared and started before the host has read it. Nothing here waits for the device:
results are returned as an `AsyncModelRunnerOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig
from swell.configs.section import LogprobsMode
from swell.kernels.inputs import Bucket
from swell.worker.comm.groups import GroupError
from swell.worker.comm.mesh import Mesh
from swell.worker.drafting.draft_model import NO_DRAFT_MODEL, NoDraftModel
from swell.worker.drafting.draft_runner import StepHidden
from swell.worker.lora import NO_ADAPTERS, AdapterNotLoaded, AdapterSlots, NoAdapters
from swell.worker.memory.block_files import BlockFiles
from swell.worker.memory.offload_store import OffloadStore
from swell.worker.model_interfaces import ComputesLogits, Model, SupportsPromptEmbeds
from swell.worker.moe.dp_sync import DPSync, DPSyncResult
from swell.worker.moe.routed_experts import RoutedExpertsReader, RouteRecorder
from swell.worker.pooling.hidden_state_reader import PoolingReader
from swell.worker.pooling.pooler import Pooler
from swell.worker.sample.logits_processor import HiddenStatesReader, PendingExtra
from swell.worker.sample.logprobs import make_readers
from swell.worker.sample.sampler import Sampler, SamplerOutput
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.buckets import Buckets, EngineStep, NoBuckets
from swell.worker.step.captured_forward import make_forward
from swell.worker.step.failed_rows import NON_REQUEST_ERRORS, FailedRows, describe
from swell.worker.step.forward import HeadOutput
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.multi_step import ExtraSteps, OutputOfPasses, RowEnds
from swell.worker.step.prompt_embeds import PromptEmbedsTable
from swell.worker.step.request_states import RequestStates
from swell.worker.step.staging import AsyncCopy
from swell.worker.step.token_feedback import PendingSends, make_feedback
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, NewRequest, SchedulerOutput


class ReadyOutput(AsyncModelRunnerOutput):
    """A result that is already in host memory."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


class CopyingOutput(AsyncModelRunnerOutput):
    """A result that is copied from a CUDA device on a separate stream, so that the copy does not
    wait for the next step's kernels."""

    def __init__(
        self,
        output: ModelRunnerOutput,
        sampled: SamplerOutput,
        mesh: Mesh,
        stream: torch.cuda.Stream,
    ) -> None:
        """`output` lacks the sampled tokens and the extras, which `get_output` fills in."""
        self._output = output
        self._sampled = sampled  # its tensors must exist until the copy is done
        self._mesh = mesh
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._copy = AsyncCopy(sampled.to_cpu_nonblocking, stream)

    def get_output(self) -> ModelRunnerOutput:
        host = self._copy.wait()
        # An aborted collective does not raise an error on the host by itself.
        self._mesh.check()
        return host.fill(self._output)


def with_default_params(row: NewRequest) -> NewRequest:
    """Returns the row with parameters that every sampler accepts."""
    return replace_fields(row, sampler=SamplerParams(), min_tokens=0, end_token_ids=[])


def with_only_tokens(row: NewRequest) -> NewRequest:
    """Returns the row without anything that can be refused."""
    return replace_fields(with_default_params(row), prompt_embeds=None, adapter="")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRunnerArgs:
    """The parts that a model runner works with."""

    model: Model
    """This worker's stage and tensor part (see `worker/models`); its attention layers are bound to
    caches."""
    mesh: Mesh
    scheduler: SchedulerConfig
    cache: CacheConfig
    max_model_len: int
    """Tokens of the longest sequence."""
    device: torch.device
    enforce_eager: bool = False
    """Whether no step is captured."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """The values that are returned as log probabilities."""
    compute_nans_in_logits: bool = False
    """Whether NaN are counted in every step."""
    tokenizer_path: str = ""
    """The folder of the tokenizer."""
    pooler: Pooler | None = None
    """Set if the model pools."""
    offload: OffloadStore | None = None
    """The store of offloaded blocks."""
    block_files: BlockFiles | None = None
    """Reads and writes blocks that engines hand over."""
    draft_tokens: int = 0
    """The most draft tokens of a step."""
    adapters: NoAdapters = NO_ADAPTERS
    """The adapters in the model's layers."""
    routes: RouteRecorder | None = None
    """Set if the choices of experts are recorded."""
    draft_model: NoDraftModel = NO_DRAFT_MODEL
    """Proposes the next tokens of rows."""
    dp_sync: DPSync = field(default_factory=DPSync)
    """Synchronizes the steps of engines that share experts."""


class ModelRunner:
    """Executes plans in the order in which they arrive. Every worker of an engine gets each plan.

    All tensor ranks of the last stage sample the same tokens from the same logits; one of them,
    `is_output_rank`, returns them.
    """

    def __init__(self, args: ModelRunnerArgs) -> None:
        model, mesh, device = args.model, args.mesh, args.device
        scheduler, block_tokens = args.scheduler, args.cache.block_tokens
        rows, max_model_len = scheduler.max_rows, args.max_model_len
        self.model, self.mesh = model, mesh
        self.states = RequestStates(rows, max_model_len, device)
        self.blocks = BlockTables(rows, max_model_len, block_tokens, device)
        workers = mesh.tensor.size * mesh.pipeline.size
        self._row_ends = RowEnds.of(self.states.token_ids, workers)
        self._offload = args.offload
        self._block_files = args.block_files
        self._device = device
        self.failed = FailedRows()
        self.sampler = Sampler(
            self.states,
            model.vocab_size,
            args.tokenizer_path,
            self.failed,
            mesh.tensor,
            args.logprobs_mode,
            args.compute_nans_in_logits,
        )
        self.readers: list[HiddenStatesReader] = (
            [PoolingReader(args.pooler, self.states)]
            if args.pooler is not None
            else make_readers(model, self.states, args.logprobs_mode)
            if isinstance(model, ComputesLogits)
            else []
        )
        self.routes = args.routes
        if self.routes is not None:
            self.readers.append(RoutedExpertsReader(self.routes, self.states, self.blocks))
        width = model.embedding_width if isinstance(model, SupportsPromptEmbeds) else None
        self.prompt_embeds = PromptEmbedsTable(width, device, mesh.is_first_stage)
        step_tokens = scheduler.max_tokens_per_step
        self.adapters = AdapterSlots(args.adapters, max(step_tokens, rows), device)
        self.feedback = make_feedback(mesh, self.states)
        self.dp_sync = args.dp_sync
        self._model_step = make_forward(model, self.states, mesh, args.enforce_eager)
        self._buckets = (
            Buckets(rows, step_tokens, args.draft_tokens)
            if self._model_step.needs_buckets
            else NoBuckets()
        )
        self.batches = BatchBuilder(
            self.states, self.blocks, step_tokens, args.draft_tokens, mesh.exact
        )
        self._reads_all = self.routes is not None or args.draft_model.reads_hidden
        self._draft_runner = args.draft_model.make_runner(self.states, self.blocks, step_tokens)
        # The engine does not plan further ahead than this, so an older send has been received.
        self._pending_sends = PendingSends(scheduler.steps_in_flight)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_output_rank(self) -> bool:
        """Whether this worker returns the outputs of `execute_model`; one worker of the engine
        does."""
        return self.mesh.is_output_rank

    @property
    def progress(self) -> int:
        """Counts the operations computed without calling the model's layers. May be read from any
        thread."""
        return self._model_step.progress + self._draft_runner.progress

    @property
    def captures(self) -> list[list[Callable[[], None]]]:
        """For the model without adapters, with adapters, and for the draft model: functions that
        capture the steps that may be captured, where each of their sizes is captured by itself; the
        largest first."""
        buckets = self._buckets.largest_first()
        adapted = self._captures_of(buckets, adapted=True) if self.adapters.may_adapt else []
        return [self._captures_of(buckets), adapted, self._draft_runner.captures]

    def _captures_of(
        self, buckets: Iterable[Bucket], adapted: bool = False
    ) -> list[Callable[[], None]]:
        heads = self._model_step.captured_heads
        return [
            partial(self._capture, bucket, head, adapted) for bucket in buckets for head in heads
        ]

    @torch.inference_mode()
    def _capture(self, bucket: Bucket, head: HeadOutput, adapted: bool) -> None:
        batch = self.batches.build(SchedulerOutput(0), bucket)
        if adapted:
            batch = replace(batch, adapters=self.adapters.no_tokens())
        self._model_step.capture(batch, head)

    def capture_steps(self, on_progress: Callable[[int, int], None]) -> None:
        """Captures the steps in which every row computes one token, where each of their sizes is
        captured by itself. Others are captured when they first occur. Calls `on_progress` with the
        number of steps captured and of all steps, first with 0, unless there are none."""
        captures = self._captures_of(reversed(self._buckets.decode))
        if captures:
            on_progress(0, len(captures))
        with torch.inference_mode():
            self._model_step.reserve(self.batches, self._buckets)
        for number, capture in enumerate(captures, 1):
            capture()
            on_progress(number, len(captures))

    def drop_captures(self) -> None:
        """Forgets all captured steps; called before the engine's groups are left. Communicators of
        NCCL cannot be freed as long as a captured step contains their operations."""
        self._model_step.drop_captures()
        self._draft_runner.drop_captures()

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Computes one step. Returns None on all workers except the output rank."""
        output = self._execute(plan)
        if not plan.extra_steps:
            return output
        extra_steps = ExtraSteps(plan, self._row_ends.has_ended)
        passes = [output, *map(self._execute, extra_steps)]
        computed = [each for each in passes if each is not None]
        return OutputOfPasses(plan, computed, extra_steps.rows) if computed else None

    def _execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        self.feedback.before_step(plan)
        self._apply(plan)
        reading = [reader for reader in self.readers if reader.reads(plan)]
        embeds = self.prompt_embeds.override(plan)
        all_hidden = bool(reading) or self._reads_all
        step = EngineStep.of(plan)
        is_capturable = embeds is None and (not all_hidden or step.samples == step.tokens)
        step = step._replace(is_capturable=is_capturable)
        sync_result = self.dp_sync.before_step(plan, step)
        if sync_result.moves_experts:
            self._model_step.drop_captures()
        bucket = self._buckets.choose(sync_result.steps)
        if bucket is not None:
            self._model_step.reserve(self.batches, self._buckets)
        if not plan.slots:
            self._execute_dummy(plan, bucket)
            return self._output(plan, sync_result, None)
        batch = self.batches.build(plan, bucket)
        if all_hidden or (self.mesh.shares_experts and bucket is None):
            batch = replace(batch, all_hidden=True)  # dp_sync has announced all tokens
        head = HeadOutput.ARGMAX if self.sampler.needs_only_argmax(batch) else HeadOutput.LOGITS
        batch = replace(batch, prompt_embeds=embeds, is_capturable=is_capturable)
        if (tokens := self.adapters.tokens(plan)) is not None:
            batch = replace(batch, adapters=tokens)
        hidden = self._forward(batch, head, plan)
        self.feedback.after_forward(batch)
        if hidden is None:
            return None
        pending_extras = [extra for reader in reading for extra in reader(hidden, batch, plan)]
        sampled = self._sample(hidden, batch, head, pending_extras)
        read = StepHidden(hidden, self._model_step.take_layer_inputs())
        self._draft_runner.after_sampling(plan, sampled, read)
        self._export(plan)
        return self._output(plan, sync_result, sampled)

    def _execute_dummy(self, plan: SchedulerOutput, bucket: Bucket | None) -> None:
        """Takes part in the other engines' step: this engine is idle."""
        if bucket is None:
            self.dp_sync.execute_dummy_batch()
        else:
            batch = self.batches.build(plan, bucket)
            self._model_step.hidden(batch, None, HeadOutput.LOGITS)

    def drain(self) -> None:
        """Finishes all messages between the workers before the groups are left. Every step must
        have been computed, and every worker of the engine calls it."""
        self.feedback.drain()
        self._pending_sends.drain()
        self.mesh.drain()

    def _apply(self, plan: SchedulerOutput) -> None:
        """Puts new requests into their slots, and assigns blocks to new and running requests."""
        if plan.copies:
            assert self._offload is not None, "the engine has checked the worker's limits"
            self._offload.apply(plan.copies)
        for file in plan.imports:
            assert self._block_files is not None, "the engine has checked that the file exists"
            try:
                self._block_files.read(file)
            except OSError as error:  # the engine starts over: this worker is not at fault
                raise GroupError(f"cannot read the blocks of another engine: {error}") from error
        for row in plan.new_requests:
            self.failed.forget(row.slot)
            try:
                self._add_request(row)
            except (*NON_REQUEST_ERRORS, AdapterNotLoaded):
                raise
            except Exception as error:
                self.failed.add(row.slot, f"the worker refused the request: {describe(error)}")
                self._add_refused(row)
            self.blocks.stage_set(row.slot, row.block_ids)
        for blocks in plan.new_blocks:
            self.blocks.stage_append(blocks.slot, blocks.block_ids)
        self.states.stage_drafts(plan)
        self.states.apply()
        self.blocks.apply()

    def _add_refused(self, row: NewRequest) -> None:
        """Adds a refused request with default parameters, so that its blocks hold the KV that their
        hashes name. If its embeddings or adapter are refused themselves, only its tokens are added:
        then no other request with the same block hashes is valid either."""
        try:
            self._add_request(with_default_params(row))
        except (*NON_REQUEST_ERRORS, AdapterNotLoaded):
            raise
        except Exception:
            self._add_request(with_only_tokens(row))

    def _add_request(self, row: NewRequest) -> None:
        """Adds a request to its slot. Raises what the request's own data raises: the same on every
        rank that samples. The tokens are staged last, so they are staged only once even if a
        parameter is refused first."""
        if self.mesh.is_last_stage:  # the others do not sample
            self.sampler.add_request(row)
        for reader in self.readers:
            reader.add_request(row)
        self._row_ends.add_request(row)
        self.prompt_embeds.add_request(row)
        self.adapters.add_request(row)
        self.states.stage(row)

    def _export(self, plan: SchedulerOutput) -> None:
        """Writes blocks for other engines. A stage writes its part before it sends to the next
        stage, and its tensor ranks wait for each other, so all parts exist when the step's result
        is returned."""
        if not plan.exports or self._block_files is None:
            return
        for file in plan.exports:
            self._block_files.write(file)
        if self.mesh.tensor.size > 1:
            self.mesh.tensor.all_reduce(torch.zeros(1, device=self._device)).item()

    def _forward(self, batch: InputBatch, head: HeadOutput, plan: SchedulerOutput) -> Tensor | None:
        """Returns, on the last stage, the hidden states for this head (see
        `InputBatch.hidden_indices`). The other stages send theirs to the next stage and return
        None."""
        stage, group, routes = self.mesh.stage, self.mesh.pipeline, self.routes
        intermediate = None
        if not self.mesh.is_first_stage:
            intermediate = self._model_step.make_intermediate(batch)
            for tensor in intermediate.tensors():
                group.recv(tensor, stage - 1)
            if routes is not None:
                routes.receive(batch.num_tokens, group, stage - 1)
        result = self._model_step.hidden(batch, intermediate, head)
        if self.mesh.is_last_stage:
            assert isinstance(result, Tensor)
            if routes is not None:
                routes.keep(batch)
            return result
        self._export(plan)
        leaving = result.tensors()
        if batch.bucket is not None:  # a later step may overwrite them while they are sent
            leaving = [tensor.clone() for tensor in leaving]
        if routes is not None:
            leaving += routes.leaving(batch.num_tokens)
        self._pending_sends.add([group.send(tensor, stage + 1) for tensor in leaving])
        return None

    def _sample(
        self,
        hidden: Tensor,
        batch: InputBatch,
        head: HeadOutput,
        pending_extras: list[PendingExtra],
    ) -> SamplerOutput | None:
        """Samples the tokens of each row that samples and writes them to the states. Returns None
        if no row samples and there are no pending extras."""
        if batch.num_samples == 0:
            nothing = hidden.new_zeros(0, dtype=torch.float32)
            return (
                SamplerOutput(batch, batch.sample_slots, nothing, pending_extras)
                if pending_extras
                else None
            )
        result = self._model_step.head(head, hidden, batch)
        if head is HeadOutput.ARGMAX:
            tokens, max_logits = result
            sampled = SamplerOutput(batch, tokens, max_logits)
        else:
            (logits,) = result
            sampled = self.sampler(logits, batch)
            self.states.write_sampled(batch.sample_slots, batch.sample_positions, sampled.tokens)
        self.feedback.after_sampling(sampled.tokens)
        sampled.pending_extras += pending_extras
        return sampled

    def _output(
        self, plan: SchedulerOutput, sync_result: DPSyncResult, sampled: SamplerOutput | None
    ) -> AsyncModelRunnerOutput | None:
        if not self.is_output_rank:
            return None
        output = ModelRunnerOutput(
            plan.step,
            [],
            sync_result.working,
            sync_result.pausing,
            sync_result.sync_s,
            failed=self.failed.among(plan.slots),
            invalid=self.failed.invalid_among(plan.slots),
            imbalance=sync_result.imbalance,
        )
        if sampled is None:
            return ReadyOutput(output)
        if self._copy_stream is not None:
            return CopyingOutput(output, sampled, self.mesh, self._copy_stream)
        return ReadyOutput(sampled.fill(output))
