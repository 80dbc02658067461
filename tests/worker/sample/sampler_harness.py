"""A sampler with its states, for logits that a test chooses."""

from __future__ import annotations

import torch

from swell.worker.sample.sampler import Sampler
from swell.worker.sampler_wire import SamplerParams
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput
from tests.worker.sample.reference_sampler import ReferenceRow

CPU = torch.device("cpu")
ROWS, LENGTH, VOCAB = 5, 40, 37

NOTHING = SamplerParams(temperature=1.0, seed=4)
EVERYTHING = SamplerParams(
    temperature=1.0,
    seed=3,
    repetition_penalty=1.4,
    frequency_penalty=0.7,
    presence_penalty=0.3,
    logit_bias={1: 2.0, 2: -1.5},
    bad_words=[[3], [4, 5], [1, 2, 6]],
    allowed_token_ids=list(range(12)),
)


class SamplerHarness:
    """Rows in slots; tokens that are sampled for a row are appended to it."""

    def __init__(self, max_rows: int = ROWS) -> None:
        self.states = RequestStates(max_rows, LENGTH, CPU)
        self.blocks = BlockTables(max_rows, LENGTH, 16, CPU)
        self.sampler = Sampler(self.states, VOCAB)
        self.rows: dict[int, ReferenceRow] = {}

    def take(self, rows: dict[int, ReferenceRow]) -> None:
        """Puts requests into slots, as a step does."""
        for slot, row in rows.items():
            new = row.new_request(slot)
            self.states.stage(new)
            self.sampler.add_request(new)
        self.states.apply()
        self.rows.update(rows)

    def batch(self, slots: list[int]) -> InputBatch:
        """Returns a batch that computes the last known token of each row and samples for each."""
        plan = SchedulerOutput(
            0,
            slots=slots,
            starts=[len(self.rows[slot].known) - 1 for slot in slots],
            num_tokens=[1] * len(slots),
            samples=[True] * len(slots),
        )
        return BatchBuilder(self.states, self.blocks, self.states.max_rows).build(plan)

    def step(self, slots: list[int], logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Returns the logits after all processors, and the sampled tokens."""
        batch, logits = self.batch(slots), logits.clone()
        tokens = self.sampler(logits, batch).tokens
        self.states.write_sampled(batch.sample_slots, batch.sample_positions, tokens)
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            self.rows[slot].outputs.append(token)
        return logits, tokens.tolist()
