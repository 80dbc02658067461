"""What may happen to logits before a token is drawn, and what is told of a step beside tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from swell.worker.input_batch import InputBatch
from swell.worker.sample.wire import Extra
from swell.worker.wire import NewRow, SchedulerOutput

BANNED_BIAS = -1e30
"""Added to the logit of a token that must not be drawn. Finite: where everything else is ruled out
(a grammar leaves one token, and a ban names it), the last one left is drawn, and never NaN."""


class LogitsProcessor(ABC):
    """One wish about tokens, for all rows that have it.

    What no row of the batch asks for is not computed, and the host knows that without a look at
    the device. A row's result must not depend on the other rows.
    """

    @abstractmethod
    def add_request(self, row: NewRow) -> None:
        """A request takes its slot, with the outputs that it has; what stood there is gone.

        Here, and not where many rows are computed at once, is whatever a request's own data may
        break: who raises is refused alone, and its slot is taken by a request without wishes.
        """

    @abstractmethod
    def rows(self, batch: InputBatch) -> np.ndarray:
        """[M] int64: which of the batch's S rows that sample have the wish. Where there is none,
        nothing else is asked of the stage in this step."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """Change logits [S, V] float32 of these rows in place."""

    def drawn(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        """tokens [S] int64 were drawn, on the device."""
        return

    def pending_extras(self, batch: InputBatch, rows_np: np.ndarray) -> list[PendingExtra]:
        """What is to be told of the rows, once they are drawn."""
        return []


class PendingExtra(ABC):
    """Something to tell of a step, on its way from the device."""

    tensors: list[Tensor]
    """What is copied to the host."""

    def extras(self, host: list[Tensor]) -> Iterator[tuple[int, Extra | None]]:
        """Row of the step -> what is told of it, None: its logits are no numbers; `host` are the
        tensors there."""
        return iter(())

    def failures(self, host: list[Tensor]) -> Iterator[tuple[int, str]]:
        """Row of the step -> why it cannot go on."""
        return iter(())


class HiddenStatesReader(ABC):
    """Tells of a step from its hidden states, before anything is drawn. What no row asks for costs
    nothing, and all tensor ranks of the last stage compute the same."""

    @abstractmethod
    def add_request(self, row: NewRow) -> None:
        """A request takes its slot; what stood there is gone."""

    @abstractmethod
    def reads(self, plan: SchedulerOutput) -> bool:
        """Whether it wants the hidden states of a step's tokens."""

    @abstractmethod
    def __call__(
        self, hidden: Tensor, batch: InputBatch, plan: SchedulerOutput
    ) -> list[PendingExtra]:
        """hidden [T, hidden], of the last stage, of a step that it reads."""
