"""An ingress's way to the stored responses."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from swell.cluster.api.http_errors import HTTPError
from swell.cluster.api.responses.response_store import (
    Cancel,
    Delete,
    Read,
    Store,
    StoredLookup,
    StoredResponse,
    StoreKey,
    StoreReply,
    StoreRequest,
)
from swell.configs.log import StructuredLogger
from swell.configs.secret import SecretText

_STORE_TIMEOUT_S = 2.0
"""How long an answer may wait for the store to keep it."""
_UNAVAILABLE_S = 10.0
"""A store that did not answer gets nothing to keep for so long."""


def store_key(owner: SecretText, id: str) -> StoreKey:
    """The name under which the store has the response `id` of `owner` (`Access.check_user`): a
    client with another key finds nothing under it. Where there are no keys, all share one
    namespace."""
    return f"{owner}/{id}" if owner else id


def response_id_of(key: StoreKey) -> str:
    return key.rpartition("/")[2]


class StoreUnavailable(HTTPError):
    """The store does not answer: perhaps it is being replaced. The log has the reason: it may name
    hosts, which are nothing for users."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "the stored responses cannot be reached now; try again later",
            "store_unavailable",
        )


class ResponseStoreClient:
    """Every method is one call of the store; any failure of the call raises `StoreUnavailable`."""

    def __init__(self, store: Any) -> None:
        """`store`: the handle of `ResponseStoreService`; None: nothing is kept."""
        self._store = store
        self._unavailable_until_s = 0.0
        self._failures = 0
        """Calls in a row that were not answered."""
        self._log = StructuredLogger("cluster.ingress")

    async def keep(self, id: str, kept: StoredResponse) -> bool:
        """Store a response; returns whether it is stored, perhaps by another ingress that gave the
        same answer. Never raises, and waits for the store only if it answered lately: the answer
        does not depend on the store."""
        if time.monotonic() < self._unavailable_until_s:
            return False
        try:
            stored = await self.call(Store(id, kept))
            return stored is True or await self.call(Read(id)) is not None
        except StoreUnavailable:
            self._unavailable_until_s = time.monotonic() + _UNAVAILABLE_S
            self._log.warning("responses are not kept", for_s=_UNAVAILABLE_S)
            return False

    async def found(self, request: Read | Cancel | Delete) -> StoredLookup:
        """Raises HTTPError 404 if there is no such response."""
        found = await self.call(request)
        if not isinstance(found, StoredLookup):
            raise HTTPError(
                404,
                f"there is no response {response_id_of(request.id)!r}: it was not stored, was "
                "deleted, or had to make room for others",
                "response_not_found",
            )
        return found

    async def call(self, request: StoreRequest) -> StoreReply:
        """None also if nothing is stored."""
        if self._store is None:
            return None
        try:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                reply: StoreReply = await self._store.handle.remote(request)
        except Exception as error:  # any error of the call
            self._failures += 1
            if self._failures.bit_count() == 1:  # the first, the second, the fourth ...
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self._log.warning("no answer of the store", failures=self._failures, error=reason)
            raise StoreUnavailable from None
        self._failures = 0
        return reply
