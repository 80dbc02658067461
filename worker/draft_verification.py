"""The drafts of a step, and which of them the sampled tokens confirm.

A draft is a proposal for a row's next token. The row computes its drafts right after the tokens
that it knows, and samples after each position as if the drafts before it were its tokens:

    position            s       s + 1    s + 2
    token               known   d1       d2         (drafts)
    sampled after it    t0      t1       t2
    kept                t0      t1 if d1 = t0       t2 if also d2 = t1

The noise of a token is a function only of seed and position, so t0 is the token that a step without
drafts would have sampled, t1 is the token of the step after it if d1 was right, and so on: the kept
tokens are those that would have been sampled without drafts, greedy or not. Tokens that are not
kept do not matter later: the next step computes their positions again, before anything reads them.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.worker.wire import SchedulerOutput

_FIRST = -1
"""Marks the first sample of a row, which does not follow a draft and is always kept."""
_REFUSED = -2
"""Marks a refused draft: it equals no token."""


class StepDrafts:
    """S samples; the samples of a row are adjacent. Arrays that logits processors need are computed
    on first use."""

    def __init__(self, plan: SchedulerOutput) -> None:
        """`plan`: the plan of a step with drafts."""
        self._samples, self._drafts = plan.samples, plan.drafts
        self._refused: set[int] = set()

    @cached_property
    def _ends(self) -> list[int]:
        """For each row of the step, the index after its last sample."""
        return list(accumulate(self._samples))

    @cached_property
    def _first_np(self) -> np.ndarray:
        """[S] int64, the index of the first sample of the same row"""
        counts = np.array(self._samples, dtype=np.int64)
        return np.repeat(counts.cumsum() - counts, counts)

    @cached_property
    def offsets_np(self) -> np.ndarray:
        """[S] int64, the number of drafts of its row before the sample"""
        return np.arange(len(self._first_np)) - self._first_np

    @cached_property
    def _drafts_np(self) -> np.ndarray:
        """[S] int64, the draft right before the sample"""
        drafts = np.full(len(self._first_np), _FIRST)
        for row, tokens in self._drafts.items():
            end = self._ends[row]
            drafts[end - len(tokens) : end] = tokens
        return drafts

    def token(self, sample: int) -> int:
        """Returns the draft right before a sample that has an offset."""
        return int(self._drafts_np[sample])

    def refuse(self, sample: int) -> None:
        """Refuses the draft before this sample: neither it nor any later draft of the row is kept,
        regardless of the sampled tokens."""
        self._refused.add(sample)

    def before(self, samples_np: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """samples_np [M] -> [P] int64 each: an index into M, and a draft of the same row before
        that sample; all such pairs."""
        counts = self.offsets_np[samples_np]
        index = np.repeat(np.arange(len(samples_np)), counts)
        back = counts.cumsum()[index] - 1 - np.arange(len(index))
        return index, self._drafts_np[samples_np[index] - back]

    def kept_on_device(self, tokens: Tensor) -> Tensor:
        """tokens [S] int64, as sampled -> [S] bool: the same as `kept`, without waiting for the
        device"""
        drafts_np = self._drafts_np.copy()
        drafts_np[list(self._refused)] = _REFUSED
        draft, first = to_device(np.stack([drafts_np, self._first_np]), tokens.device)
        missed = ((tokens.roll(1) != draft) & (draft != _FIRST)).cumsum(0)
        return missed == missed[first]

    def accepted(self, tokens: list[int]) -> dict[int, int]:
        """Returns row -> how many of its drafts are kept, for the rows with drafts. `tokens`: those
        of the S samples."""
        accepted = {}
        for row, drafts in self._drafts.items():
            first, count = self._ends[row] - len(drafts) - 1, 0
            for sample, draft in enumerate(drafts, first):
                if tokens[sample] != draft or sample + 1 in self._refused:
                    break
                count += 1
            accepted[row] = count
        return accepted

    def kept(self, accepted: dict[int, int]) -> list[bool]:
        """Returns for each sample whether it is kept. `accepted`: the counts of all rows with
        drafts."""
        kept = [True] * self._ends[-1]
        for row, count in accepted.items():
            end, missed = self._ends[row], len(self._drafts[row]) - count
            kept[end - missed : end] = [False] * missed
        return kept
