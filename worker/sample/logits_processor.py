"""Interfaces for changing logits before sampling, and for results of a step other than its
tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from swell.worker.sampler_wire import Extra
from swell.worker.step.input_batch import InputBatch
from swell.worker.wire import NewRequest, SchedulerOutput

BANNED_BIAS = -1e30
"""The amount added to the logit of a banned token. It is finite: if a grammar allows only banned
tokens, one of these is sampled, and no logit becomes NaN."""


class LogitsProcessor(ABC):
    """One kind of sampling parameter, for all rows that use it.

    It costs nothing in a step in which no row uses it, and the host decides that without reading
    the device. A row's result must not depend on the other rows.
    """

    @abstractmethod
    def add_request(self, row: NewRequest) -> None:
        """Adds the request that takes a slot, with the outputs that it has. Drops the slot's old
        state.

        Errors in the request's own data must be raised here, not where many rows are computed
        together: then only this request fails, and `add_request` is called again for its slot with
        default parameters.
        """

    @abstractmethod
    def rows(self, batch: InputBatch) -> np.ndarray:
        """Returns [M] int64: the indices of the batch's S samples whose rows use the parameter. If
        there are none, no other method is called in this step."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """Changes logits [S, V] float32 of these rows in place."""

    def on_sampled(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """Called after tokens [S] int64 were sampled; they are on the device."""
        return

    def pending_extras(self, batch: InputBatch, rows_np: np.ndarray) -> list[PendingExtra]:
        """Returns results for the rows other than their tokens; called after `on_sampled`."""
        return []


class PendingExtra(ABC):
    """A result of a step that is still on the device. It is read from its copy on the host."""

    @abstractmethod
    def to_cpu_nonblocking(self) -> PendingExtra:
        """Returns a copy on the host. From a CUDA device it is copied on the current stream, and
        `self` must exist until that copy is done."""

    def filter(self, kept: list[bool]) -> PendingExtra:
        """Returns the result without the samples that are not kept; `kept`: one entry for each of
        the S samples."""
        return self

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        """Yields (row of the step, its result); None: the row's logits are NaN or infinite."""
        return iter(())

    def failures(self) -> Iterator[tuple[int, str]]:
        """Yields (row of the step, why its request fails)."""
        return iter(())


class HiddenStatesReader(ABC):
    """Computes results from the hidden states of a step, before sampling. It costs nothing if no
    row uses it, and all tensor ranks of the last stage compute the same."""

    @abstractmethod
    def add_request(self, row: NewRequest) -> None:
        """Adds the request that takes a slot. Drops the slot's old state."""

    @abstractmethod
    def reads(self, plan: SchedulerOutput) -> bool:
        """Whether the reader needs the hidden states of a step."""

    @abstractmethod
    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        """Returns the results of a step for which `reads` is true; hidden [T, hidden] is from the
        last stage."""
