"""An ingress's way to the responses that the manager keeps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from swell.cluster.api.http import HTTPError
from swell.cluster.api.responses.stored import (
    Beat,
    Begin,
    Found,
    Kept,
    Leave,
    Orders,
    Store,
    StoreReply,
    StoreWish,
)
from swell.configs.log import FactLogger

_ASK_S = 2.0
"""How long an answer may wait for the manager to keep it."""
_AWAY_S = 10.0
"""A manager that did not answer is not asked to keep anything for so long."""


def key_of(owner: str, id: str) -> str:
    """The name under which the store has the response `id` of `owner` (`KeyRing.owner`): who
    shows another key finds nothing under it. Where there are no keys, all share one namespace."""
    return f"{owner}/{id}" if owner else id


def id_of(key: str) -> str:
    return key.rpartition("/")[2]


class StoreAway(HTTPError):
    """The manager does not answer: perhaps it is being replaced."""

    def __init__(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        super().__init__(
            503,
            f"the stored responses cannot be reached now ({reason}); try again later",
            "store_unavailable",
            "server_error",
        )


class ResponseStore:
    """Every call is one call of the manager; whatever keeps it from answering is `StoreAway`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._away_until_s = 0.0
        self._log = FactLogger("cluster.ingress")

    async def keep(self, id: str, kept: Kept) -> bool:
        """Whether it is kept. Never raises, and waits for the manager only if it answered lately:
        an answer is given whatever becomes of the store."""
        if time.monotonic() < self._away_until_s:
            return False
        try:
            return await self.store(id, kept)
        except StoreAway as away:
            self._away_until_s = time.monotonic() + _AWAY_S
            self._log.warning("responses are not kept", error=str(away))
            return False

    async def store(self, id: str, kept: Kept, runner: str = "") -> bool:
        """False: there is no room, or it was cancelled or deleted while it ran, or taken over."""
        return await self._ask(Store(id, kept, runner)) is True

    async def begin(self, begin: Begin) -> bool:
        return await self._ask(begin) is True

    async def beat(self, runner: str, ids: list[str], takes: int) -> Orders:
        orders = await self._ask(Beat(runner, ids, takes))
        return orders if isinstance(orders, Orders) else Orders([], [])

    async def leave(self, runner: str) -> None:
        await self._ask(Leave(runner))

    async def found(self, wish: StoreWish) -> Found:
        """What a wish to read, cancel or delete finds. HTTPError 404 where there is nothing."""
        found = await self._ask(wish)
        if not isinstance(found, Found):
            id = id_of(getattr(wish, "id", ""))
            raise HTTPError(
                404,
                f"there is no response {id!r}: it was not stored, was deleted, or had to make room "
                "for others",
                "response_not_found",
            )
        return found

    async def _ask(self, wish: StoreWish) -> StoreReply:
        try:
            async with asyncio.timeout(_ASK_S):
                reply: StoreReply = await self._manager.stored.remote(wish)
        except Exception as error:  # whatever keeps the manager from answering
            raise StoreAway(error) from None
        return reply
