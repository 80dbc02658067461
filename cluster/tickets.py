"""Requests on their way: where each is, where it was, and how many engines it may have cost."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from swell.cluster.link import EngineId
from swell.cluster.outputs import RequestOutput, RequestOutputCollector, RequestOutputKind
from swell.engine.wire import EngineCoreRequest

MAX_STRIKES = 5
"""A request that loses more engines than this, one after the other and without a token from any of
them, may be what kills them. One that goes on between is not: it is only unlucky."""

Outputs = AsyncGenerator[RequestOutput]
Numbered = AsyncGenerator[tuple[int, RequestOutput]]


class EngineGone(RuntimeError):
    """A request could not be finished by any engine."""


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
        self.strikes = 0
        self._given_tokens = 0
        """Tokens that the runs before this one gave."""

    @property
    def run_id(self) -> str:
        """Its name at the engine where it is."""
        runs = len(self.ranks)
        return self.request.request_id if runs < 2 else f"{self.request.request_id}.{runs}"

    def place(self, engine: EngineId, given_tokens: int) -> None:
        """A run begins, after `given_tokens` tokens of the answer."""
        self.engine = engine
        self.ranks.append(engine.rank)
        self._given_tokens = given_tokens

    def displace(self, reason: Move, given_tokens: int) -> None:
        """The run has ended. Raises EngineGone after too many that ended badly."""
        self.engine = None
        if given_tokens > self._given_tokens:
            self.strikes = 0
        elif reason is not Move.LEFT:
            self.strikes += 1
        if self.strikes > MAX_STRIKES:
            raise EngineGone(
                f"given up after {self.strikes} engines in a row were lost before they gave it a "
                f"token (engines {self.ranks}): {reason}"
            )


def engines_of(tickets: Sequence[Ticket]) -> str:
    """The ranks that served, in order, comma-separated; of several prompts each rank once."""
    ranks: Iterable[int] = tickets[0].ranks
    if len(tickets) > 1:
        ranks = dict.fromkeys(rank for ticket in tickets for rank in ticket.ranks)
    return ",".join(map(str, ranks))


async def chain(first: tuple[int, RequestOutput], rest: Numbered) -> Numbered:
    yield first
    async with contextlib.aclosing(rest) as outputs:
        async for item in outputs:
            yield item


async def merge(read: Callable[[Ticket], Outputs], tickets: Sequence[Ticket]) -> Numbered:
    """Outputs of all tickets as they come, with the index of their ticket; those that are left
    are closed when the reader leaves."""
    if len(tickets) == 1:
        async with contextlib.aclosing(read(tickets[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(1)

    async def forward(index: int, ticket: Ticket) -> None:
        try:
            async for output in read(ticket):
                await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(i, ticket)) for i, ticket in enumerate(tickets)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
