"""The sizes to which an engine's steps are padded where captured steps have fixed sizes (CUDA
graphs).

A step in which every row computes one token has a bucket by its rows. Any other step, which
computes drafts or parts of prompts, has a bucket by its tokens; one with more tokens than all
buckets is not captured, since its kernels take longer than their launches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from swell.kernels.inputs import Bucket

_ROWS = (1, 2, 4, *range(8, 257, 8))
_TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_TOKENS = _TOKENS[-1]
"""The most tokens of a bucket."""


class Buckets:
    """The buckets of one engine."""

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

    def find(self, tokens: int, rows: int, samples: int, max_query_tokens: int) -> Bucket | None:
        """Returns the smallest bucket for a step of these sizes; None: the step is too large."""
        buckets = self.decode if max_query_tokens <= 1 else self.mixed
        sizes = Bucket(tokens, rows, samples, max_query_tokens)
        for bucket in buckets[bisect_left(buckets, sizes) :]:
            if all(size <= room for size, room in zip(sizes, bucket, strict=True)):
                return bucket
        return None


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes below `most`, and `most` itself unless it is larger than all of them."""
    return [size for size in sizes if size < most] + [most] * (most <= sizes[-1])
