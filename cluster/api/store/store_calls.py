"""Calls from an ingress to the process that keeps responses and sessions."""

from __future__ import annotations

import asyncio
from typing import Any

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.configs.runtime.log import StructuredLogger

_CALL_TIMEOUT_S = 2.0
"""The timeout of a call to the store."""


class StoreUnavailable(HTTPError):
    """The store does not answer, perhaps because it is being replaced. The reason is only logged:
    it may name hosts, which users must not see."""

    def __init__(self, what: str) -> None:
        super().__init__(
            503,
            f"the {what} cannot be reached now; try again later",
            "store_unavailable",
            RETRY_AFTER,
        )


class StoreCalls:
    """Calls one method of `StoreService`."""

    def __init__(self, method: Any, what: str) -> None:
        """`method` belongs to the store's handle. `what` names the kept data in error messages."""
        self._method = method
        self._what = what
        self._failures = 0
        """The number of consecutive calls without a reply."""
        self._log = StructuredLogger("cluster.ingress")

    async def call(self, request: Any) -> Any:
        """Returns the reply of the store. Any failure of the call raises `StoreUnavailable`."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = await self._method.remote(request)
        except Exception as error:  # any error of the call
            self._failures += 1
            if self._failures.bit_count() == 1:  # logs the first, second, fourth, ... failure
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self._log.warning("the store did not answer", failures=self._failures, error=reason)
            raise StoreUnavailable(self._what) from None
        self._failures = 0
        return reply
