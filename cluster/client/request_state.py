"""Requests on their way: where each is, where it was, and how many engines it may have cost."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from swell.cluster.client.engine_core_client import EngineId
from swell.cluster.client.outputs import (
    Event,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import EngineCoreRequest

MAX_LOST_ATTEMPTS = 5
"""How often a request may be dropped, or go unheard, one after the other and without a token."""

OutputBatch = list[tuple[int, RequestOutput]]
"""Outputs, each with the number of its ticket."""


class EngineGone(RuntimeError):
    """A request could not be finished by any engine."""


class RequestFailed(RuntimeError):
    """A request cannot go on, by its own fault; its engine serves all others as before."""


class MigrationReason(enum.StrEnum):
    """Why a request goes on elsewhere."""

    LEFT = "the engine left as it was asked to"
    DIED = "the engine was lost"
    REPAIRING = "the engine replaces a worker"
    DROPPED = "the engine dropped it"
    MESSAGES_LOST = "messages of the engine were lost"


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
        self.lost_attempts = 0
        """Other runs that ended in vain, in a row."""
        self._output_tokens_before = 0
        """Tokens that the runs before this one gave."""

    @property
    def attempt_id(self) -> str:
        """Its name at the engine where it is."""
        runs = len(self.ranks)
        return self.request.request_id if runs < 2 else f"{self.request.request_id}.{runs}"

    def place(self, engine: EngineId, output_tokens: int) -> None:
        """A run begins, after `output_tokens` tokens of the answer."""
        self.engine, self.started = engine, False
        self.ranks.append(engine.rank)
        self._output_tokens_before = output_tokens

    def unassign(self, reason: MigrationReason, output_tokens: int) -> None:
        """The run has ended. Raises EngineGone after too many that ended badly: who goes on between
        is only unlucky, and who only waited had no part in it."""
        self.engine = None
        if output_tokens > self._output_tokens_before:
            self.failed_attempts = self.lost_attempts = 0
        elif reason in (MigrationReason.DIED, MigrationReason.REPAIRING):
            self.failed_attempts += self.started
        elif reason is not MigrationReason.LEFT:
            self.lost_attempts += 1
        if self.failed_attempts >= MAX_FAILED_ATTEMPTS:
            raise EngineGone(
                f"given up after {self.failed_attempts} engines in a row were lost while they "
                f"computed it, before they gave it a token (engines {self.ranks}): {reason}"
            )
        if self.lost_attempts > MAX_LOST_ATTEMPTS:
            raise EngineGone(
                f"given up after {self.lost_attempts} runs in a row ended before they gave it a token "
                f"(engines {self.ranks}): {reason}"
            )


def served_ranks(tickets: Sequence[Ticket]) -> str:
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
        self._ready = Event()
        self._first: OutputBatch | None = None
        for collector in self._unfinished.values():
            collector.ready = self._ready

    async def first(self) -> OutputBatch:
        """The first batch, which the iterator then gives again. Raises what a request failed
        with."""
        self._first = await anext(self)
        return self._first

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> OutputBatch:
        """Raises what a request failed with, after everything that was there before."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while self._unfinished:
            batch = self._take()
            if batch:
                return batch
            await self._ready.wait()
        raise StopAsyncIteration

    def _take(self) -> OutputBatch:
        batch: OutputBatch = []
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
