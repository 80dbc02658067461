"""Log probabilities of sampled tokens and of prompts: of the model's own logits, or of the logits
that are sampled. In the modes `raw_logits` and `processed_logits` the logits are reported instead.

Nothing is computed for rows that do not request them. The device finds as many of the most likely
tokens as the row that requests the most, and the host shortens the lists of the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from math import isnan

import numpy as np
import torch
from torch import Tensor

from swell.configs.section import LogprobsMode
from swell.kernels.host.device_copy import to_device
from swell.kernels.logprobs import LogprobsTensors, rank_tokens
from swell.kernels.sample import filter_logits
from swell.worker.model_interfaces import ComputesLogits
from swell.worker.sample.logits_processor import BANNED_BIAS, HiddenStatesReader, PendingExtra
from swell.worker.sampler_wire import Extra, PromptLogprobs, TokenLogprobs
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import MIN_P, TEMPERATURE, TOP_K, TOP_P, RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.wire import NewRequest, SchedulerOutput

SLICE_POSITIONS = 256
"""The most prompt positions whose logits exist at the same time: 150 MiB for 150 000 tokens."""

MAX_BATCHED_LOGPROBS = 128
"""Rows that request more tokens for each position are computed separately."""


@dataclass(slots=True)
class PendingLogprobs(PendingExtra):
    """Log probabilities of a step's sampled tokens."""

    ranked: LogprobsTensors
    """The log probabilities of the M samples that need them, which belong to R rows."""
    samples: list[int]
    """[M], indices among the S samples of the step."""
    rows: list[int]
    """[R], rows of the step."""
    num_logprobs: list[int]
    """[R], how many of the most likely tokens are reported."""

    def to_cpu_nonblocking(self) -> PendingLogprobs:
        return replace(self, ranked=self.ranked.to_cpu_nonblocking())

    def filter(self, kept: list[bool]) -> PendingLogprobs:
        mask = [kept[sample] for sample in self.samples]
        samples = list(compress(self.samples, mask))
        return replace(self, ranked=self.ranked.filter(mask), samples=samples)

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        lists = self.ranked.tolists()
        for index, (row, top) in enumerate(zip(self.rows, self.num_logprobs, strict=True)):
            columns = lists.slice_request(index)[:3]
            for token_ids, logprobs, rank in zip(*columns, strict=True):
                if isnan(logprobs[0]):
                    yield row, None
                else:
                    yield row, TokenLogprobs(token_ids[: 1 + top], logprobs[: 1 + top], rank)


@dataclass(slots=True)
class SamplingFilters:
    """Temperature and filters of M samples."""

    # [M, parameters] float32
    float_params: Tensor
    # [M, parameters] int64
    int_params: Tensor
    any_top_k_or_p: bool

    def apply(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns the filtered logits [M, V] float32; tokens [M] int64 are the sampled ones."""
        floats = self.float_params
        return filter_logits(
            logits,
            floats[:, TEMPERATURE],
            self.int_params[:, TOP_K],
            floats[:, TOP_P],
            floats[:, MIN_P],
            tokens,
            any_top_k_or_p=self.any_top_k_or_p,
        )


def without_banned(logits: Tensor) -> Tensor:
    """Returns logits [M, V] with -inf for tokens whose logits processors have banned by a finite
    amount."""
    lower = logits - logits.amax(-1, keepdim=True)
    return logits.masked_fill(lower < BANNED_BIAS / 2, float("-inf"))


def rank_values(logits: Tensor, token_ids: Tensor, top: int, mode: LogprobsMode) -> LogprobsTensors:
    """Returns the same as `rank_tokens`, with logits in place of log probabilities if the mode says
    so. All values of a row with NaN are NaN in any case."""
    ranked = rank_tokens(logits, token_ids, top)
    if not mode.endswith("_logits"):
        return ranked
    values = logits.gather(1, ranked.logprob_token_ids)
    return ranked._replace(logprobs=values.where(~ranked.logprobs.isnan(), float("nan")))


@dataclass(slots=True)
class KeptLogits:
    """The logits of some samples, kept until their tokens are sampled."""

    # [M, V] float32
    logits: Tensor
    # [M] int64, indices among the S samples
    index: Tensor
    samples: list[int]
    """[M], the same as `index`, on the host."""
    cu_num_generated_tokens: list[int]
    """[R + 1], see `LogprobsTensors`."""
    rows: list[int]
    """[R], indices among all rows of the step."""
    num_logprobs: list[int]
    """[R]"""
    mode: LogprobsMode
    filters: SamplingFilters | None = None
    """None: no row is sampled at random, or the logits are those of the model."""

    def rank(self, tokens: Tensor) -> PendingExtra:
        """Returns the log probabilities and ranks of the sampled tokens [S] int64."""
        logits, tokens = self.logits, tokens[self.index]
        if self.mode.startswith("processed_"):
            logits = without_banned(logits)
        if self.filters is not None:
            logits = self.filters.apply(logits, tokens)
        ranked = rank_values(logits, tokens, max(self.num_logprobs), self.mode)
        ranked = ranked._replace(cu_num_generated_tokens=self.cu_num_generated_tokens)
        return PendingLogprobs(ranked, self.samples, self.rows, self.num_logprobs)


class _NumLogprobs:
    """How many of the most likely tokens the request of each slot asks for, if it asks for
    logprobs."""

    def __init__(self, max_rows: int) -> None:
        self.active_slots = SlotSet(max_rows)
        # [max_rows]
        self.count_np = np.zeros(max_rows, dtype=np.int64)

    def set(self, slot: int, top: int | None) -> None:
        if top is not None and top < 0:
            raise ValueError(f"logprobs={top} is negative")
        self.count_np[slot] = top or 0
        self.active_slots.set(slot, top is not None)


class SampledLogprobs:
    """Log probabilities of sampled tokens. `keep_raw` is called before a processor changes logits,
    `keep_processed` after the last one; the mode decides which of them keeps logits."""

    def __init__(self, states: RequestStates, mode: LogprobsMode = "raw_logprobs") -> None:
        self._states, self._mode = states, mode
        self._is_processed = mode.startswith("processed_")
        self._num_logprobs = _NumLogprobs(states.max_rows)

    def add_request(self, row: NewRequest) -> None:
        self._num_logprobs.set(row.slot, row.sampler.logprobs)

    def any_requested(self, batch: InputBatch) -> bool:
        return len(batch.rows_in(self._num_logprobs.active_slots)) > 0

    def keep_raw(self, logits: Tensor, batch: InputBatch, will_change: bool) -> list[KeptLogits]:
        """Returns the rows of logits [S, V] float32 that need log probabilities, copied if a
        processor `will_change` them; empty if no row needs them."""
        return [] if self._is_processed else self._keep(logits, batch, will_change)

    def keep_processed(self, logits: Tensor, batch: InputBatch) -> list[KeptLogits]:
        """Returns the same for logits [S, V] float32 after all processors, with the filters of the
        rows."""
        if not self._is_processed:
            return []
        kept, states = self._keep(logits, batch, will_change=False), self._states
        if kept and len(batch.rows_in(states.random_sampling)):
            slots = batch.sample_slots[kept[0].index]
            any_top_k_or_p = len(batch.rows_in(states.with_top_k_or_p)) > 0
            kept[0].filters = SamplingFilters(
                states.float_params[slots], states.int_params[slots], any_top_k_or_p
            )
        return kept

    def _keep(self, logits: Tensor, batch: InputBatch, will_change: bool) -> list[KeptLogits]:
        samples = batch.rows_in(self._num_logprobs.active_slots)
        if not len(samples):
            return []
        slots, rows = batch.sample_slots_np, batch.sample_rows_np[samples]
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))  # of each row, the first of its samples
        index = to_device(samples, logits.device)
        all_stay = len(samples) == len(slots) and not will_change
        kept = KeptLogits(
            logits if all_stay else logits[index],
            index,
            samples.tolist(),
            [*firsts.tolist(), len(samples)],
            rows[firsts].tolist(),
            self._num_logprobs.count_np[slots[samples[firsts]]].tolist(),
            self._mode,
        )
        return [kept]


@dataclass(slots=True)
class _PromptSpan:
    """Consecutive prompt positions of one row."""

    row: int
    start: int
    count: int
    top: int


@dataclass(slots=True)
class PendingPromptLogprobs(PendingExtra):
    """Log probabilities of the prompt tokens that follow the positions computed in a step."""

    ranked: LogprobsTensors
    """The log probabilities of the concatenated spans."""
    spans: list[_PromptSpan]

    def to_cpu_nonblocking(self) -> PendingPromptLogprobs:
        return replace(self, ranked=self.ranked.to_cpu_nonblocking())

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        lists = self.ranked.tolists()
        for index, span in enumerate(self.spans):
            token_ids, logprobs, ranks, _ = lists.slice_request(index)
            if any(isnan(of_one[0]) for of_one in logprobs):
                yield span.row, None
                continue
            yield (
                span.row,
                PromptLogprobs(
                    start=span.start,
                    token_ids=[of_one[: 1 + span.top] for of_one in token_ids],
                    logprobs=[of_one[: 1 + span.top] for of_one in logprobs],
                    ranks=ranks,
                ),
            )


class PromptLogprobsReader(HiddenStatesReader):
    """Log probabilities of prompts: the hidden state of a position gives those of the next token.

        computed positions     start ................. start + n - 1
        reported tokens             start + 1 .............. start + n      (within the prompt)

    A request that takes a slot again is computed and reported again; the results carry positions.
    """

    def __init__(
        self, model: ComputesLogits, states: RequestStates, mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        self._model = model
        self._states = states
        self._mode = mode
        self._num_logprobs = _NumLogprobs(states.max_rows)
        # [max_rows]
        self._prompt_tokens_np = np.zeros(states.max_rows, dtype=np.int64)

    def add_request(self, row: NewRequest) -> None:
        self._num_logprobs.set(row.slot, row.sampler.prompt_logprobs)
        self._prompt_tokens_np[row.slot] = row.prompt_tokens

    def reads(self, plan: SchedulerOutput) -> bool:
        return self._num_logprobs.active_slots.any and bool(self._find(plan))

    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        # A row that requests the whole vocabulary must not make the lists of all other rows as
        # long.
        found = self._find(plan)
        groups = [
            [one for one in found if one[0].top <= MAX_BATCHED_LOGPROBS],
            [one for one in found if one[0].top > MAX_BATCHED_LOGPROBS],
        ]
        return [self._rank(hidden, group) for group in groups if group]

    def _rank(self, hidden: Tensor, group: list[tuple[_PromptSpan, np.ndarray]]) -> PendingExtra:
        spans = [span for span, _ in group]
        # [3, P] int64: index into T of the position before, slot, position
        packed = to_device(np.concatenate([index for _, index in group], axis=1), hidden.device)
        targets = self._states.token_ids[packed[1], packed[2]].long()
        top = max(span.top for span in spans)
        slices = []
        # The number of slices depends only on the plan, so all tensor ranks make the same calls.
        for start in range(0, packed.shape[1], SLICE_POSITIONS):
            here = slice(start, start + SLICE_POSITIONS)
            logits = self._model.compute_logits(hidden[packed[0, here]])
            slices.append(rank_values(logits, targets[here], top, self._mode)[:3])
        token_ids, logprobs, ranks = (torch.cat(column) for column in zip(*slices, strict=True))
        ends = [0, *accumulate(span.count for span in spans)]
        return PendingPromptLogprobs(LogprobsTensors(token_ids, logprobs, ranks, ends), spans)

    def _find(self, plan: SchedulerOutput) -> list[tuple[_PromptSpan, np.ndarray]]:
        """Returns the spans of the step that are reported, each with [3, count] int64, see
        `_rank`."""
        found: list[tuple[_PromptSpan, np.ndarray]] = []
        slots = np.array(plan.slots, dtype=np.int64)
        active = self._num_logprobs.active_slots.among(slots)
        if not len(active):
            return found
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        reported = np.minimum(counts, self._prompt_tokens_np[slots] - 1 - starts)
        for row in active[reported[active] > 0].tolist():
            slot, start, count = slots[row], starts[row] + 1, reported[row]
            span = _PromptSpan(row, int(start), int(count), int(self._num_logprobs.count_np[slot]))
            steps = np.arange(count)
            index = np.stack([firsts[row] + steps, np.full(count, slot), start + steps])
            found.append((span, index))
        return found


def make_readers(
    model: ComputesLogits, states: RequestStates, mode: LogprobsMode
) -> list[HiddenStatesReader]:
    """Returns the readers of hidden states of a model that samples."""
    return [PromptLogprobsReader(model, states, mode)]
