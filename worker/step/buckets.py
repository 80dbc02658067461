"""The sizes to which an engine's steps are padded where captured steps have fixed sizes (CUDA
graphs).

A step in which every row computes one token has a bucket by its rows. Any other step, which
computes drafts or parts of prompts, has a bucket by its tokens; one with more tokens than all
buckets is not captured, since its kernels take longer than their launches.

Engines that share experts compute each step together, and exchange the tokens of all of them in
each layer. So all of them pad the step to one bucket, which holds the step of each engine, or none
of them pads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from swell.kernels.inputs import Bucket
from swell.worker.wire import SchedulerOutput

_ROWS = (1, 2, 4, *range(8, 257, 8))
_TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_TOKENS = _TOKENS[-1]
"""The most tokens of a bucket."""


class EngineStep(NamedTuple):
    """The part of an engine's step that all engines of a wave must know."""

    tokens: int
    rows: int
    samples: int
    max_query_tokens: int
    """The most tokens of one row."""
    is_capturable: bool
    """Whether a capture computes what the step needs: hidden states only of tokens that are
    sampled, and no embeddings in place of tokens."""

    @classmethod
    def of(cls, plan: SchedulerOutput, is_capturable: bool = True) -> EngineStep:
        counts = plan.num_tokens
        most = max(counts, default=0)
        return cls(sum(counts), len(counts), sum(plan.samples), most, is_capturable)


class Buckets:
    """The buckets of one engine; all engines of a wave have the same."""

    def __init__(self, max_rows: int, max_tokens: int, draft_tokens: int = 0) -> None:
        """`max_rows`, `max_tokens`: those of a step; `draft_tokens`: the most drafts of a step."""
        self.decode = [Bucket(rows, rows, rows, 1) for rows in _up_to(max_rows, _ROWS)]
        """The buckets of steps in which every row computes one token, the smallest first."""
        samples = max_rows + draft_tokens
        self.mixed = [
            Bucket(tokens, min(tokens, max_rows), min(tokens, samples), tokens)
            for tokens in _up_to(max(max_tokens, samples), _TOKENS)
        ]
        """The buckets of other steps, the smallest first."""

    def largest_first(self) -> list[Bucket]:
        """Returns all buckets."""
        return sorted((*self.decode, *self.mixed), reverse=True)

    def choose(self, steps: Sequence[EngineStep]) -> Bucket | None:
        """Returns the bucket to which all engines of a wave pad their steps: the smallest that
        holds all of these steps. None: no engine pads its step, because a step cannot be captured,
        the steps together are too large, or no engine has tokens. Every engine passes the same
        steps, so all of them choose the same bucket."""
        tokens, rows, samples, max_query_tokens, capturable = zip(*steps, strict=True)
        if not any(tokens) or not all(capturable):
            return None
        return self.find(max(tokens), max(rows), max(samples), max(max_query_tokens))

    def find(self, tokens: int, rows: int, samples: int, max_query_tokens: int) -> Bucket | None:
        """Returns the smallest bucket for a step of these sizes; None: the step is too large."""
        buckets = self.decode if max_query_tokens <= 1 else self.mixed
        sizes = Bucket(tokens, rows, samples, max_query_tokens)
        for bucket in buckets[bisect_left(buckets, sizes) :]:
            if all(size <= room for size, room in zip(sizes, bucket, strict=True)):
                return bucket
        return None


class NoBuckets(Buckets):
    """The buckets of an engine whose steps are never padded."""

    def __init__(self) -> None:
        self.decode, self.mixed = [], []


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes below `most`, and `most` itself unless it is larger than all of them."""
    return [size for size in sizes if size < most] + [most] * (most <= sizes[-1])
