"""What guesses drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from swell.engine.request import Request


class Proposer(ABC):
    """Guesses how the tokens of one row go on. What it guesses cannot change an answer."""

    @abstractmethod
    def propose(self, tokens: array[int], count: int) -> list[int]:
        """At most `count` tokens of the vocabulary that may follow; `tokens` only grows from call
        to call. The work of a call is bounded, however many tokens there are."""


MakeProposer = Callable[[Request], Proposer]
"""Makes the proposer of a request that has taken a slot."""
