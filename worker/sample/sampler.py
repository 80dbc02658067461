"""Samples tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from math import isfinite

import msgspec
from torch import Tensor

from swell.configs.section import LogprobsMode
from swell.kernels.sample import greedy_sample, sample_tokens, uniform_noise
from swell.worker.comm.groups import Group, SoloGroup
from swell.worker.sample.allowed_token_ids import AllowedTokenIds
from swell.worker.sample.grammar import GrammarMask
from swell.worker.sample.logit_bias import LogitBias
from swell.worker.sample.logits_processor import LogitsProcessor, PendingExtra
from swell.worker.sample.logprobs import SampledLogprobs
from swell.worker.sample.penalties import Penalties
from swell.worker.sampler_wire import Extra
from swell.worker.step.failed_rows import FailedRows
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, RequestStates
from swell.worker.wire import ModelRunnerOutput, NewRequest


class PendingProposals:
    """The proposals of each pass of the draft model: one tensor per pass, with one token for each
    row of that pass."""

    def __init__(self, asked: Sequence[int]) -> None:
        """`asked`: the rows of the step for which the plan requests proposals."""
        self._asked = asked
        self._passes: list[tuple[list[int], Tensor]] = []

    def add(self, rows: list[int], tokens: Tensor) -> None:
        """Adds the next token of each of these rows; tokens [rows] int64"""
        self._passes.append((rows, tokens))

    def to_cpu_nonblocking(self) -> PendingProposals:
        """Returns a copy on the host."""
        copy = PendingProposals(self._asked)
        for rows, tokens in self._passes:
            copy.add(rows, tokens.to("cpu", non_blocking=True))
        return copy

    def read(self) -> dict[int, list[int]]:
        """Returns row -> its tokens, for every row for which proposals were requested."""
        found: dict[int, list[int]] = {row: [] for row in self._asked}
        for rows, tokens in self._passes:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                found[row].append(token)
        return found


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens of a step, including those after a rejected draft: on the device, or on
    the host."""

    batch: InputBatch
    # [S] int64
    tokens: Tensor
    # [S] float32: the largest logit of each sample, see `sample_tokens`
    max_logits: Tensor
    pending_extras: list[PendingExtra] = field(default_factory=list)
    pending_proposals: PendingProposals | None = None
    """The draft model's proposals; None: the plan does not request any."""
    num_nans: Tensor | None = None
    """[S] int64, the number of NaN in the model's logits of each sample; None: not counted."""

    def accepted(self) -> dict[int, int]:
        """Returns row -> how many of its drafts are kept, for the rows with drafts. Waits for the
        tokens if there are such rows."""
        drafts = self.batch.drafts
        return {} if drafts is None else drafts.accepted(self.tokens.tolist())

    def to_cpu_nonblocking(self) -> SamplerOutput:
        """Returns a copy on the host, with all tensors as described in
        `PendingExtra.to_cpu_nonblocking`."""
        proposed, num_nans = self.pending_proposals, self.num_nans
        return replace(
            self,
            tokens=self.tokens.to("cpu", non_blocking=True),
            max_logits=self.max_logits.to("cpu", non_blocking=True),
            pending_extras=[pending.to_cpu_nonblocking() for pending in self.pending_extras],
            pending_proposals=proposed.to_cpu_nonblocking() if proposed else None,
            num_nans=None if num_nans is None else num_nans.to("cpu", non_blocking=True),
        )

    def fill(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Returns `output` with tokens, extras and failures, read on the host."""
        extras: dict[int, list[Extra]] = {}
        failed = output.failed
        token_ids, accepted, drafts = self.tokens.tolist(), output.accepted, self.batch.drafts
        pending_extras, kept = self.pending_extras, None
        if drafts is not None:
            accepted = drafts.accepted(token_ids)
            kept = drafts.kept(accepted)
            token_ids = list(compress(token_ids, kept))
            pending_extras = [pending.filter(kept) for pending in pending_extras]
        with_nans = self._with_nans(self.max_logits.tolist(), kept)
        num_nans = {} if self.num_nans is None else self._nans_of_rows(self.num_nans.tolist(), kept)
        with_nans += num_nans.keys() - with_nans
        for pending in pending_extras:
            for row, extra in pending.extras():
                if extra is None:
                    with_nans.append(row)
                else:
                    extras.setdefault(row, []).append(extra)
            failed = {**dict(pending.failures()), **failed}
        proposed = self.pending_proposals
        return msgspec.structs.replace(
            output,
            sampled_token_ids=token_ids,
            extras=extras,
            failed=failed,
            rows_with_nans=with_nans,
            accepted=accepted,
            proposals=proposed.read() if proposed else {},
            num_nans_in_logits=num_nans,
        )

    def _nans_of_rows(self, num_nans: list[int], kept: list[bool] | None) -> dict[int, int]:
        """Returns row -> the number of NaN in the logits of its kept samples, if there are any."""
        found: dict[int, int] = {}
        counted = repeat(True, len(num_nans)) if kept is None else kept
        rows = self.batch.sample_rows_np.tolist()
        for row, count, counts in zip(rows, num_nans, counted, strict=True):
            if counts and count:
                found[row] = found.get(row, 0) + count
        return found

    def _with_nans(self, max_logits: list[float], kept: list[bool] | None) -> list[int]:
        """Returns the rows of the step whose largest logits are NaN or infinite, counting only
        samples that are `kept` (None: all)."""
        if isfinite(sum(max_logits)):  # a sum of max_rows floats cannot overflow
            return []
        rows = self.batch.sample_rows_np.tolist()
        counted = repeat(True, len(rows)) if kept is None else kept
        return [
            row
            for row, top, counts in zip(rows, max_logits, counted, strict=True)
            if counts and not isfinite(top)
        ]


class Sampler:
    """Samples one token for each sample of a step.

    The noise of a token is a function of the request's seed and the token's position, so it does
    not depend on preemption, failover or the batch.
    """

    def __init__(
        self,
        states: RequestStates,
        vocab_size: int,
        model_path: str = "",
        failed: FailedRows | None = None,
        tensor: Group | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        counts_nans: bool = False,
    ) -> None:
        """`model_path`: folder or hub id of the model, whose tokenizer is loaded for the first
        grammar; `failed`: where failed slots are recorded; `tensor`: the ranks that sample the same
        tokens."""
        self._states, self._counts_nans = states, counts_nans
        failed, tensor = failed or FailedRows(), tensor or SoloGroup()
        self._logprobs = SampledLogprobs(states, logprobs_mode)
        # Penalties scale the model's logits, so they come before anything is added. Biases of
        # single tokens come next. Masks come last, so that no bias can lift a masked token. The
        # grammar is the last mask: where masks contradict each other, it decides.
        self._logits_processors: list[LogitsProcessor] = [
            Penalties(states),
            LogitBias(states, vocab_size),
            AllowedTokenIds(states, vocab_size),
            GrammarMask(states, vocab_size, model_path, failed, tensor),
        ]

    def add_request(self, row: NewRequest) -> None:
        """Adds the request that takes a slot. Raises what the request's own data raises."""
        self._logprobs.add_request(row)
        for processor in self._logits_processors:
            processor.add_request(row)

    def needs_only_argmax(self, batch: InputBatch) -> bool:
        """Whether each row needs only its most likely token: then logits need not be computed."""
        return not (
            self._counts_nans
            or len(batch.rows_in(self._states.random_sampling))
            or self._logprobs.any_requested(batch)
            or any(len(processor.rows(batch)) for processor in self._logits_processors)
        )

    def __call__(self, logits: Tensor, batch: InputBatch) -> SamplerOutput:
        """logits [S, V] float32; may be changed in place."""
        active = [
            (processor, rows)
            for processor in self._logits_processors
            if len(rows := processor.rows(batch))
        ]
        num_nans = logits.isnan().sum(-1) if self._counts_nans else None
        kept = self._logprobs.keep_raw(logits, batch, will_change=bool(active))
        for processor, rows in active:
            processor.apply(logits, batch, rows)
        kept += self._logprobs.keep_processed(logits, batch)
        tokens, max_logits = self._sample(logits, batch)
        pending_extras: list[PendingExtra] = [some.rank(tokens) for some in kept]
        for processor, rows in active:
            processor.on_sampled(tokens, batch, rows)
            pending_extras += processor.pending_extras(batch, rows)
        return SamplerOutput(batch, tokens, max_logits, pending_extras, num_nans=num_nans)

    def _sample(self, logits: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Returns tokens [S] int64, sampled with temperature, min_p, top_k and top_p, and the
        largest logits."""
        states = self._states
        if not len(batch.rows_in(states.random_sampling)):
            return greedy_sample(logits)
        slots = batch.sample_slots
        float_params, int_params = states.float_params[slots], states.int_params[slots]
        return sample_tokens(
            logits,
            float_params[:, TEMPERATURE],
            int_params[:, TOP_K],
            float_params[:, TOP_P],
            float_params[:, MIN_P],
            uniform_noise(int_params[:, SEED], batch.sample_positions),
            any_top_k_or_p=len(batch.rows_in(states.with_top_k_or_p)) > 0,
        )
