"""Interfaces: changes of logits before sampling, and results of a step beside its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from swell.worker.input_batch import InputBatch
from swell.worker.sample.wire import Extra
from swell.worker.wire import NewRow, SchedulerOutput

BANNED_BIAS = -1e30
"""Added to the logit of a banned token. Finite: where a grammar allows only banned tokens, one of
these is sampled, and no logit becomes NaN."""


class LogitsProcessor(ABC):
    """One kind of sampling parameter, for all rows that use it.

    It costs nothing in a step where no row uses it, and the host decides that without reading the
    device. A row's result must not depend on the other rows.
    """

    @abstractmethod
    def add_request(self, row: NewRow) -> None:
        """A request takes its slot, with the outputs that it has; the slot's old state is dropped.

        Errors in the request's own data must be raised here, not where many rows are computed
        together: then this request fails alone, and `add_request` is called once more for its slot
        with default parameters.
        """

    @abstractmethod
    def rows(self, batch: InputBatch) -> np.ndarray:
        """[M] int64: which of the batch's S rows that sample use the parameter. If there are none,
        no other method is called in this step."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """Change logits [S, V] float32 of these rows in place."""

    def on_sampled(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """tokens [S] int64 were sampled; they lie on the device."""
        return

    def pending_extras(self, batch: InputBatch, rows_np: np.ndarray) -> list[PendingExtra]:
        """Results for the rows beside their tokens; called after `on_sampled`."""
        return []


class PendingExtra(ABC):
    """A result of a step that is still on the device. Its copy on the host is read."""

    @abstractmethod
    def to_cpu_nonblocking(self) -> PendingExtra:
        """The same on the host. From a CUDA device it is copied on the current stream, and `self`
        must exist until that has come so far."""

    def filter(self, kept: list[bool]) -> PendingExtra:
        """Without what belongs to samples that are not kept; `kept`: of each of the S samples."""
        return self

    def extras(self) -> Iterator[tuple[int, Extra | None]]:
        """(row of the step, its result); None: its logits are no numbers."""
        return iter(())

    def failures(self) -> Iterator[tuple[int, str]]:
        """(row of the step, why its request fails)."""
        return iter(())


class HiddenStatesReader(ABC):
    """Computes results from the hidden states of a step, before sampling. It costs nothing where no
    row uses it, and all tensor ranks of the last stage compute the same."""

    @abstractmethod
    def add_request(self, row: NewRow) -> None:
        """A request takes its slot; the slot's old state is dropped."""

    @abstractmethod
    def reads(self, plan: SchedulerOutput) -> bool:
        """Whether it needs the hidden states of a step."""

    @abstractmethod
    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        """The results of a step for which `reads` is true; hidden [T, hidden], of the last
        stage."""
