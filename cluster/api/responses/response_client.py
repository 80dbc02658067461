"""The client of one ingress for the stored responses."""

from __future__ import annotations

import time
from typing import Any

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.store.bounded_table import id_of
from swell.cluster.api.store.response_store import (
    Cancel,
    Delete,
    Read,
    Store,
    StoredLookup,
    StoredResponse,
)
from swell.cluster.api.store.store_client import StoreClient, StoreUnavailable

_UNAVAILABLE_S = 10.0
"""After a failed call, `keep` does not use the store for this long."""


class ResponseStoreClient(StoreClient):
    """Methods raise `StoreUnavailable` if a call fails."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "stored responses")
        self._unavailable_until_s = 0.0

    async def keep(self, id: str, kept: StoredResponse) -> bool:
        """Stores a response. Returns whether it is stored, perhaps by another ingress with the same
        answer. Never raises, and only waits for the store if it answered recently, because the
        answer does not depend on the store."""
        if time.monotonic() < self._unavailable_until_s:
            return False
        try:
            stored = await self.call(Store(id, kept))
            return stored is True or await self.call(Read(id)) is not None
        except StoreUnavailable:
            self._unavailable_until_s = time.monotonic() + _UNAVAILABLE_S
            self._log.warning("responses are not stored", for_s=_UNAVAILABLE_S)
            return False

    async def found(self, request: Read | Cancel | Delete) -> StoredLookup:
        """Returns the stored response. Raises HTTPError 404 if it does not exist."""
        found = await self.call(request)
        if not isinstance(found, StoredLookup):
            raise HTTPError(
                404,
                f"there is no response {id_of(request.id)!r}: it was not stored, was "
                "deleted, or was evicted to make room for others",
                "response_not_found",
            )
        return found
