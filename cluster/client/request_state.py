"""Requests on their way: where each is, where it was, and how many engines it may have cost."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from swell.cluster.client.links import EngineId
from swell.cluster.client.outputs import (
    Bell,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import EngineCoreRequest

MAX_LOST_RUNS = 5
"""How often a request may be dropped, or go unheard, one after the other and without a token."""

Batch = list[tuple[int, RequestOutput]]
"""Outputs, each with the number of its ticket."""


class EngineGone(RuntimeError):
    """A request could not be finished by any engine."""


class RequestFailed(RuntimeError):
    """A request cannot go on, by its own fault; its engine serves all others as before."""


class Move(enum.StrEnum):
    """Why a request goes on elsewhere."""

    LEFT = "the engine left as it was asked to"
    DIED = "the engine was lost"
    REPAIRING = "the engine replaces a worker"
    DROPPED = "the engine dropped it"
    UNHEARD = "messages of the engine were lost"


class Ticket:
    """One request on its way. Each engine gets it under a name of its own, so that what an engine
    says late about an earlier run belongs to nobody."""

    def __init__(self, request: EngineCoreRequest, kind: RequestOutputKind) -> None:
        self.request = request
        self.collector = RequestOutputCollector(kind, request.request_id)
        self.engine: EngineId | None = None
        """Where it is; None while there is no engine for it."""
        self.ranks: list[int] = []
        """The engines that served it, in order."""
        self.started = False
        """The engine has said that it is in a step, or is about to be."""
        self.failed_attempts = 0
        """Engines that were lost while it was in a step, in a row and without a token from any."""
        self.lost_runs = 0
        """Other runs that ended in vain, in a row."""
        self._given_tokens = 0
        """Tokens that the runs before this one gave."""

    @property
    def run_id(self) -> str:
        """Its name at the engine where it is."""
        runs = len(self.ranks)
        return self.request.request_id if runs < 2 else f"{self.request.request_id}.{runs}"

    def place(self, engine: EngineId, given_tokens: int) -> None:
        """A run begins, after `given_tokens` tokens of the answer."""
        self.engine, self.started = engine, False
        self.ranks.append(engine.rank)
        self._given_tokens = given_tokens

    def displace(self, reason: Move, given_tokens: int) -> None:
        """The run has ended. Raises EngineGone after too many that ended badly: who goes on between
        is only unlucky, and who only waited had no part in it."""
        self.engine = None
        if given_tokens > self._given_tokens:
            self.failed_attempts = self.lost_runs = 0
        elif reason in (Move.DIED, Move.REPAIRING):
            self.failed_attempts += self.started
        elif reason is not Move.LEFT:
            self.lost_runs += 1
        if self.failed_attempts >= MAX_FAILED_ATTEMPTS:
            raise EngineGone(
                f"given up after {self.failed_attempts} engines in a row were lost while they "
                f"computed it, before they gave it a token (engines {self.ranks}): {reason}"
            )
        if self.lost_runs > MAX_LOST_RUNS:
            raise EngineGone(
                f"given up after {self.lost_runs} runs in a row ended before they gave it a token "
                f"(engines {self.ranks}): {reason}"
            )


def engines_of(tickets: Sequence[Ticket]) -> str:
    """The ranks that served, in order, comma-separated; of several prompts each rank once."""
    ranks: Iterable[int] = tickets[0].ranks
    if len(tickets) > 1:
        ranks = dict.fromkeys(rank for ticket in tickets for rank in ticket.ranks)
    return ",".join(map(str, ranks))


class Outputs:
    """What the requests of one answer give, as it comes: an async iterator over batches, each of
    them all that is there. One task reads it."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._unfinished = dict(enumerate(ticket.collector for ticket in tickets))
        self._bell = Bell()
        self._first: Batch | None = None
        for collector in self._unfinished.values():
            collector.bell = self._bell

    async def first(self) -> Batch:
        """The first batch, which the iterator then gives again. Raises what a request failed
        with."""
        self._first = await anext(self)
        return self._first

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Batch:
        """Raises what a request failed with, after everything that was there before."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while self._unfinished:
            batch = self._take()
            if batch:
                return batch
            await self._bell.wait()
        raise StopAsyncIteration

    def _take(self) -> Batch:
        batch: Batch = []
        for number, collector in self._unfinished.items():
            try:
                output = collector.get_nowait()
            except Exception:
                if not batch:
                    raise
                break
            if output is not None:
                batch.append((number, output))
        for number, output in batch:
            if output.finished:
                del self._unfinished[number]
        return batch
