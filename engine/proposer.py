"""The interface of draft proposers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from swell.engine.request import Request


class Proposer(ABC):
    """Proposes the next tokens of one row. Proposals never change an answer."""

    @abstractmethod
    def propose(self, tokens: array[int], count: int) -> list[int]:
        """Returns at most `count` tokens of the vocabulary that may follow `tokens`, which only
        grows from call to call. The work of a call is bounded, independent of the number of
        tokens."""


MakeProposer = Callable[[Request], Proposer]
"""Creates the proposer of a request that has got a slot."""
