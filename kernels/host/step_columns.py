"""The parts of `inputs.make_gather` that the host computes: checks of a step, and its rows and
samples as one array, so that one copy takes them to a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from swell.kernels.inputs import Bucket, Inputs, Sizes


class StepColumns(NamedTuple):
    """One step of R rows, T tokens and S samples."""

    sizes: Sizes
    packed: np.ndarray
    """[4 * R + 3 * S] int64: for each row its slot, the sum of the tokens up to and including it,
    its first position less the tokens before it, and its tokens in the cache; for each sample the
    index into T of the token before it, its slot, and its position."""


class ColumnPacker:
    """Checks steps against the tables, and packs them."""

    def __init__(
        self, token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs
    ) -> None:
        """The arguments are those of `make_gather`."""
        self._token_ids, self._out = token_ids, out
        self._room = block_table.shape[1] * block_tokens

    def __call__(
        self, slots: list[int], starts: list[int], counts: list[int], samples: list[int]
    ) -> StepColumns:
        """Raises like `Gather`."""
        check_room(sum(counts), len(slots), sum(samples), self._out)
        columns = np.array([slots, starts, counts, samples], dtype=np.int64)
        self._check(columns)
        slots_np, starts_np, counts_np, samples_np = columns
        ends_np, context_np = counts_np.cumsum(), starts_np + counts_np
        sample_rows = np.repeat(np.arange(len(slots)), samples_np)
        # [S]: how many sampled positions of the row follow
        back_np = samples_np.cumsum()[sample_rows] - 1 - np.arange(len(sample_rows))
        sampling = (
            ends_np[sample_rows] - 1 - back_np,
            slots_np[sample_rows],
            context_np[sample_rows] - back_np,
        )
        sizes = Sizes(
            tokens=int(counts_np.sum()),
            rows=len(slots),
            samples=len(sample_rows),
            max_query_tokens=int(counts_np.max(initial=0)),
            max_context_tokens=int(context_np.max(initial=0)),
        )
        rows = slots_np, ends_np, context_np - ends_np, context_np
        return StepColumns(sizes, np.concatenate((*rows, *sampling)))

    def _check(self, columns: np.ndarray) -> None:
        slots, starts, counts, samples = columns
        table, length = self._token_ids.shape
        inside = (slots >= 0) & (slots < table) & (starts >= 0) & (counts >= 0)
        inside &= (starts + counts + (samples > 0) <= length) & (starts + counts <= self._room)
        inside &= samples <= counts.clip(1)
        if not inside.all():
            row = int(inside.argmin())
            raise outside(row, int(slots[row]), int(starts[row]), self._token_ids)


def check_room(tokens: int, rows: int, samples: int, out: Inputs) -> None:
    """Raises `ValueError` if a step does not fit."""
    for count, what, room in (
        (tokens, "tokens", len(out.input_ids)),
        (rows, "rows", len(out.context_tokens)),
        (samples, "samples", out.samples.shape[1]),
    ):
        if count > room:
            raise ValueError(
                f"a step has {count} {what}, but there is room for {room}: the scheduler has lost "
                "count"
            )


def check_bucket(sizes: Sizes, bucket: Bucket) -> None:
    """Raises `ValueError` if a step does not fit into its bucket."""
    for name, room in bucket._asdict().items():
        if getattr(sizes, name) > room:
            raise ValueError(
                f"a step has {name}={getattr(sizes, name)}, but its bucket has only {room}"
            )


def outside(row: int, slot: int, start: int, token_ids: Tensor) -> IndexError:
    """Returns the error for a row that is outside of the tables."""
    slots, length = token_ids.shape
    return IndexError(
        f"row {row} of the step: slot {slot} from position {start} is outside the tables of "
        f"{slots} slots with {length} tokens each"
    )
