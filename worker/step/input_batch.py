"""The tensors of one step, made from the scheduler's plan.

One flat batch, without padding between its rows. For example, with rows of 1, 1 and 3 tokens:

    token            0     1     2  3  4
    row              0     1     2  2  2
    query_start      0     1     2        5
    positions        s0    s1    s2 s2+1 s2+2      (s: the row's start)
    logits_indices   0     1           4           (of the rows that sample; if the last token of
                                                   the third row is a draft: 0, 1, 3, 4)

The host copies its data to the device in one transfer. Token ids and blocks are looked up on the
device, which already has the tokens sampled by the previous step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.inputs import Bucket, Inputs, Sizes, make_gather
from swell.worker.draft_verification import StepDrafts
from swell.worker.layers.lora import AdaptedTokens
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.prompt_embeds import EmbedsOverride
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import NO_ROWS, SlotSet
from swell.worker.wire import SchedulerOutput


@dataclass(frozen=True)
class InputBatch:
    """A batch of R rows, T tokens and S samples: one sample per row that samples, and one per
    draft. Its tensors are valid until the next batch is built."""

    plan: SchedulerOutput
    inputs: Inputs
    """Tensors with the sizes of the largest step; this step uses their first elements."""
    sizes: Sizes
    block_tokens: int
    all_hidden: bool
    """Whether the hidden states of all tokens are read, not only those of `logits_indices`."""
    prompt_embeds: EmbedsOverride | None = None
    """Embeddings that replace those of the batch's tokens, on the first stage."""
    adapters: AdaptedTokens | None = None
    """The tokens that have adapters; None: none has."""
    bucket: Bucket | None = None
    """The sizes to which the inputs are padded; None: they are not padded."""
    is_capturable: bool = True
    """See `EngineStep.is_capturable`."""
    exact: bool = False
    """Whether attention is exact (see `AttentionMetadata`)."""

    @property
    def num_tokens(self) -> int:
        return self.sizes.tokens

    @property
    def num_samples(self) -> int:
        return self.sizes.samples

    @property
    def input_ids(self) -> Tensor:
        """[T] int64"""
        return self.inputs.input_ids[: self.sizes.tokens]

    @property
    def positions(self) -> Tensor:
        """[T] int64"""
        return self.inputs.positions[: self.sizes.tokens]

    @cached_property
    def attention(self) -> AttentionMetadata:
        tokens, rows = self.sizes.tokens, self.sizes.rows
        blocks = -(-self.sizes.max_context_tokens // self.block_tokens)
        return AttentionMetadata(
            query_start=self.inputs.query_start[: rows + 1],
            context_tokens=self.inputs.context_tokens[:rows],
            block_table=self.inputs.block_table[:rows, :blocks],
            slot_mapping=self.inputs.slot_mapping[:tokens],
            max_query_tokens=self.sizes.max_query_tokens,
            max_context_tokens=self.sizes.max_context_tokens,
            exact=self.exact,
        )

    @property
    def hidden_indices(self) -> Tensor | None:
        """[W] int64, index into T of the tokens whose last hidden states are read; None: all T"""
        return None if self.all_hidden else self.logits_indices

    def padded_slots(self, hidden_indices: Tensor | None) -> Tensor | None:
        """Returns slots of the tokens `hidden_indices` of this batch, or of all tokens, in which
        padding has the slot -1: [W] int64; None: the batch is not padded."""
        if self.bucket is None:
            return None
        return self.attention.slot_mapping if hidden_indices is None else self.sample_slots

    @property
    def logits_indices(self) -> Tensor:
        """[S] int64, index into T of the token before each sampled one"""
        return self.inputs.samples[0, : self.sizes.samples]

    @property
    def sample_slots(self) -> Tensor:
        """[S] int64"""
        return self.inputs.samples[1, : self.sizes.samples]

    @property
    def sample_positions(self) -> Tensor:
        """[S] int64, the position of the sampled token"""
        return self.inputs.samples[2, : self.sizes.samples]

    def rows_in(self, active_slots: SlotSet) -> np.ndarray:
        """[M] int64: the indices of the S samples whose rows are in a set of slots."""
        return active_slots.among(self.sample_slots_np) if active_slots.any else NO_ROWS

    @cached_property
    def drafts(self) -> StepDrafts | None:
        """The drafts of the step; None: no row has drafts."""
        return StepDrafts(self.plan) if self.plan.drafts else None

    @cached_property
    def sample_rows_np(self) -> np.ndarray:
        """[S] int64, the step's row of each sample"""
        if self.plan.drafts:
            return np.repeat(np.arange(len(self.plan.samples)), self.plan.samples)
        return np.flatnonzero(self.plan.samples)

    @cached_property
    def sample_slots_np(self) -> np.ndarray:
        """[S] int64, the host's copy of `sample_slots`"""
        return np.array(self.plan.slots, dtype=np.int64)[self.sample_rows_np]

    @cached_property
    def sample_positions_np(self) -> np.ndarray:
        """[S] int64, the host's copy of `sample_positions`"""
        plan = self.plan
        ends = np.array([plan.starts, plan.num_tokens], dtype=np.int64).sum(0)
        if self.drafts is None:
            return ends[self.sample_rows_np]
        firsts = ends + 1 - np.array(plan.samples, dtype=np.int64)
        return firsts[self.sample_rows_np] + self.drafts.offsets_np


SPARE = 32
"""The tokens, rows and samples that the inputs have room for in addition to those of the largest
step: a capture distinguishes the three, and the dimensions of the model, by their values."""


class BatchBuilder:
    """Builds one batch at a time; all batches use the same tensors."""

    def __init__(
        self,
        states: RequestStates,
        blocks: BlockTables,
        max_tokens: int,
        draft_tokens: int = 0,
        exact: bool = False,
    ) -> None:
        """`max_tokens`: the most tokens of one step; `draft_tokens`: the most drafts of a step;
        `exact`: of all batches."""
        rows, device = states.max_rows, states.token_ids.device
        samples = rows + draft_tokens
        tokens = max(max_tokens, samples)
        self._block_tokens = blocks.block_tokens
        self._exact = exact
        self._inputs = Inputs.allocate(
            tokens + SPARE, rows + SPARE, blocks.max_blocks, device, samples + SPARE
        )
        self._gather = make_gather(
            states.token_ids, blocks.tensor, blocks.block_tokens, self._inputs
        )

    def build(self, plan: SchedulerOutput, bucket: Bucket | None = None) -> InputBatch:
        """Builds the batch of a plan whose new requests and new_blocks have been applied, padded to
        `bucket`. Raises `ValueError` or `IndexError` for a plan that does not fit (see
        `Gather`)."""
        sizes = self._gather(plan.slots, plan.starts, plan.num_tokens, plan.samples, bucket)
        every = sizes.samples == sizes.tokens
        return InputBatch(
            plan,
            self._inputs,
            sizes,
            self._block_tokens,
            all_hidden=every,
            bucket=bucket,
            exact=self._exact,
        )
