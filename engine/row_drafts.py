"""The drafts of one row: who proposes them, and how many the next step should have. Pure.

A row starts with FIRST_LENGTH drafts. If all are accepted, it gets twice as many next time;
otherwise one more than were accepted. If in more consecutive steps than the patience of its method
none is accepted, it pauses: for FIRST_PAUSE tokens, and each time for twice as many, up to
MAX_DOUBLINGS times, until a draft is accepted again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

FIRST_LENGTH = 3
FIRST_PAUSE = 4
MAX_DOUBLINGS = 5


class Proposer(ABC):
    """Proposes the next tokens of one row. Proposals never change an answer."""

    @abstractmethod
    def propose(self, tokens: array[int], count: int) -> list[int]:
        """Returns at most `count` tokens of the vocabulary that may follow `tokens`, which only
        grows from call to call. The work of a call is bounded, independent of the number of
        tokens."""


class RowDrafts:
    """The state of a request's drafts while it runs."""

    __slots__ = ("length", "misses", "patience", "proposer", "resume_at")

    def __init__(self, proposer: Proposer, patience: int = 0) -> None:
        """`patience`: number of consecutive steps that may accept no draft before the row
        pauses."""
        self.proposer, self.patience = proposer, patience
        self.length = FIRST_LENGTH
        self.misses = 0
        """Number of consecutive steps that accepted no draft."""
        self.resume_at = 0
        """The row gets no drafts before it has this many tokens."""

    def on_result(self, drafted: int, accepted: int, total_tokens: int) -> None:
        """Updates the state after a step accepted some drafts; the row now has `total_tokens`."""
        if accepted:
            self.misses = 0
            self.length = 2 * drafted if accepted == drafted else accepted + 1
            return
        self.length = 1
        doublings = self.misses - self.patience
        if doublings >= 0:
            self.resume_at = total_tokens + (FIRST_PAUSE << doublings)
        self.misses = min(self.misses + 1, self.patience + MAX_DOUBLINGS)
