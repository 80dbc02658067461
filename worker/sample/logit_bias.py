"""Parameters that change the logits of single tokens: `logit_bias`, `bad_words`, and `min_tokens`,
before which end tokens are banned.

All of them are *entries*: an amount that is added to one token's logit. A row's entries are made
once, when it takes its slot; a step concatenates the entries of its rows, sends them in one copy
and adds them in one scatter.

An entry may depend on the tokens before the sampled one. For example, the bad word [a, b, c] is an
entry for c with the amount `BANNED_BIAS` and two *conditions*: the token one position back is b,
and the one two positions back is a. Only the device knows the newest tokens, so it checks the
conditions: an entry with a condition that does not hold adds 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.worker.sample.logits_processor import BANNED_BIAS, LogitsProcessor
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.wire import NewRequest

ALWAYS = np.iinfo(np.int64).max
NO_TOKEN = -1
"""Equals no token id, so a condition on a position before the prompt does not hold."""


@dataclass(frozen=True, slots=True)
class _BiasEntries:
    """E entries and C conditions of one row."""

    # [E] int64 each: the token, and the first position at which the entry no longer applies
    tokens: np.ndarray
    until: np.ndarray
    # [E] float64
    amounts: np.ndarray
    # [C] int64 each: the entry, how many tokens back, and the token required there
    entry: np.ndarray
    back: np.ndarray
    required: np.ndarray

    @classmethod
    def of(cls, row: NewRequest, vocab: int) -> _BiasEntries | None:
        """Returns the entries of biases, then of end tokens, then of the last tokens of bad words;
        None if the row has none.

        Raises `ValueError` for a token outside of the vocabulary.
        """
        bias, words = row.sampler.logit_bias, row.sampler.bad_words
        ends = row.end_token_ids if row.min_tokens > 0 else []
        if not (bias or words or ends):
            return None
        first_word = len(bias) + len(ends)
        before = [
            (first_word + i, len(word) - 1 - j, token)
            for i, word in enumerate(words)
            for j, token in enumerate(word[:-1])
        ]
        conditions = np.array(before, dtype=np.int64).reshape(-1, 3)
        until = np.full(first_word + len(words), ALWAYS)
        until[len(bias) : first_word] = row.prompt_tokens + row.min_tokens
        amounts = np.full(len(until), BANNED_BIAS)
        amounts[: len(bias)] = list(bias.values())
        tokens = np.array([*bias, *ends, *(word[-1] for word in words)], dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise ValueError(f"a token with a bias is outside the vocabulary, 0 .. {vocab - 1}")
        return cls(
            tokens=tokens,
            until=until,
            amounts=amounts,
            entry=conditions[:, 0],
            back=conditions[:, 1],
            required=conditions[:, 2],
        )


class LogitBias(LogitsProcessor):
    """Applies `logit_bias`, `bad_words` (over prompt and output) and `min_tokens` of all rows."""

    def __init__(self, states: RequestStates, vocab: int) -> None:
        self._states = states
        self._vocab = vocab
        # [max_rows]
        self._entries: list[_BiasEntries | None] = [None] * states.max_rows
        self._active_slots = SlotSet(states.max_rows)
        # [max_rows] the first position at which the slot's entries no longer apply
        self._until_np = np.zeros(states.max_rows, dtype=np.int64)

    def add_request(self, row: NewRequest) -> None:
        entries = _BiasEntries.of(row, self._vocab)
        self._entries[row.slot] = entries
        self._until_np[row.slot] = 0 if entries is None else entries.until.max()
        self._active_slots.set(row.slot, entries is not None)

    def rows(self, batch: InputBatch) -> np.ndarray:
        rows = batch.rows_in(self._active_slots)
        if not len(rows):
            return rows
        until = self._until_np[batch.sample_slots_np[rows]]
        return rows[batch.sample_positions_np[rows] < until]

    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        slots, positions = batch.sample_slots_np[rows_np], batch.sample_positions_np[rows_np]
        entries = [self._entries[slot] for slot in slots.tolist()]
        host = [
            *_joined_entries(entries, rows_np, positions),
            *_conditions(entries, slots, positions),
        ]
        packed = to_device(np.concatenate(host), logits.device)
        row, token, amount, entry, slot, position, required = packed.split([len(x) for x in host])
        amounts = amount.view(torch.float64).float()
        if len(entry):
            seen = self._states.token_ids[slot, position]
            # An entry with conditions has the amount `BANNED_BIAS`. "amax" sets it to 0 if one of
            # its conditions does not hold.
            amounts.scatter_reduce_(
                0, entry, torch.where(seen == required, BANNED_BIAS, 0.0), "amax"
            )
        logits.index_put_((row, token), amounts, accumulate=True)


def _joined_entries(
    entries: list[_BiasEntries], rows: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row, token and amount of all entries, [E] int64 each. The amounts are the bits of
    float64 values, so that everything is copied in one array."""
    counts = [len(one.tokens) for one in entries]
    amounts = np.concatenate([one.amounts for one in entries])
    until = np.concatenate([one.until for one in entries])
    amounts[np.repeat(positions, counts) >= until] = 0
    tokens = np.concatenate([one.tokens for one in entries])
    return np.repeat(rows, counts), tokens, amounts.view(np.int64)


def _conditions(
    entries: list[_BiasEntries], slots: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns entry, slot, position and required token of all conditions, [C] int64 each. Entries
    are numbered across all rows."""
    counts = [len(one.entry) for one in entries]
    sizes = np.array([len(one.tokens) for one in entries])
    entry = np.concatenate([one.entry for one in entries])
    entry += np.repeat(np.cumsum(sizes) - sizes, counts)
    position = np.repeat(positions, counts) - np.concatenate([one.back for one in entries])
    required = np.concatenate([one.required for one in entries])
    required[position < 0] = NO_TOKEN
    return entry, np.repeat(slots, counts), position.clip(0), required
