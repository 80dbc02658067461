"""The inputs of a step, gathered from tables: token ids, positions, and slots in the cache.

A CUDA graph has fixed sizes, so a step that it computes is padded to a `Bucket`. Every operation
ignores the padding: the cache, the tables and the results are those of the step itself.

    input_ids, positions   0 from `tokens` on
    slot_mapping           -1 from `tokens` on: `write_kv` writes nothing
    query_start            `tokens` from `rows` on: rows without tokens
    context_tokens         0 from `rows` on
    samples                (0, -1, 0) from `samples` on: `write_tokens` writes nothing

The results of padded tokens and samples are undefined.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from swell.kernels import backends


class Sizes(NamedTuple):
    """The sizes of one step."""

    tokens: int
    rows: int
    samples: int
    """Number of positions after which a token is sampled."""
    max_query_tokens: int
    """The most tokens of one row."""
    max_context_tokens: int
    """The most tokens of one row in the cache, including those of this step."""


class Bucket(NamedTuple):
    """The sizes to which a step is padded."""

    tokens: int
    rows: int
    samples: int
    max_query_tokens: int


class Inputs(NamedTuple):
    """Tensors for up to R rows with T tokens in total."""

    # [T] int64
    input_ids: Tensor
    # [T] int64
    positions: Tensor
    # [R + 1] int32; row r owns the tokens query_start[r] .. query_start[r + 1] - 1
    query_start: Tensor
    # [R] int32, tokens of the row in the cache, including those of this step
    context_tokens: Tensor
    # [R, blocks] int32
    block_table: Tensor
    # [T] int64, block * block_tokens + offset of each token's K and V
    slot_mapping: Tensor
    # [3, S] int64, for each sampled token: index into T of the token before it, slot, and position
    samples: Tensor

    @classmethod
    def allocate(
        cls,
        tokens: int,
        rows: int,
        blocks: int,
        device: torch.device,
        samples: int | None = None,
    ) -> Inputs:
        """Allocates tensors for the largest step; `samples`: number of tokens sampled in it (None:
        one for each row)."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            query_start=zeros(rows + 1, dtype=torch.int32),
            context_tokens=zeros(rows, dtype=torch.int32),
            block_table=zeros(rows, blocks, dtype=torch.int32),
            slot_mapping=zeros(tokens, dtype=torch.int64),
            samples=zeros(3, samples or rows, dtype=torch.int64),
        )


class Gather(Protocol):
    """Fills the inputs of one step after the other; never waits for the device."""

    def __call__(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        samples: list[int],
        bucket: Bucket | None = None,
    ) -> Sizes:
        """Fills the inputs of a step, and the padding up to the sizes of `bucket`. Row r computes
        `counts[r]` tokens, from position `starts[r]` on, of the request at `slots[r]`, and samples
        a token after each of its last `samples[r]` positions.

        Returns the sizes of the step itself. It must fit into the bucket, and the bucket into the
        inputs.

        Raises `IndexError` for a row outside of the tables (including the position of its last
        sampled token) or with more samples than tokens, and `ValueError` for more tokens, rows or
        samples than the inputs hold; then the inputs are undefined.
        """


def make_gather(token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs) -> Gather:
    """Returns a `Gather` that fills `out` from the tables; all of these must keep their memory.

    token_ids [slots, length] int32, whose element p is the token at position p; block_table
    [slots, max_blocks] int32. Backends: reference, cpu, triton.
    """
    return backends.get("inputs", token_ids.device.type).make_gather(
        token_ids, block_table, block_tokens, out
    )


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Sets token_ids[slots[i], positions[i]] = tokens[i], except where slots[i] is -1 (padding).

    All [S] int64, and token_ids as in `make_gather`. Raises `IndexError` for an index outside of
    the table, except on a GPU and in a replay, for which the `Gather` has checked it. Backends:
    reference, cpu, triton.
    """
    backends.get("inputs", token_ids.device.type).write_tokens(token_ids, slots, positions, tokens)
