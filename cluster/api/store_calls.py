"""An ingress's calls of the process that keeps responses and sessions."""

from __future__ import annotations

import asyncio
from typing import Any

from swell.cluster.api.http_errors import RETRY_AFTER, HTTPError
from swell.configs.log import StructuredLogger
from swell.configs.secret import SecretText

_CALL_TIMEOUT_S = 2.0
"""How long the store may take to answer."""


def store_key(owner: SecretText, id: str) -> SecretText:
    """The name under which the store has what `owner` (`Access.check_user`) calls `id`: a client
    with another key finds nothing under it. Where there are no keys, all share one namespace."""
    return f"{owner}/{id}" if owner else id


def owner_of(key: SecretText) -> SecretText:
    """The `owner` of a `store_key`."""
    owner, separator, _ = key.partition("/")
    return owner if separator else ""


class StoreUnavailable(HTTPError):
    """The store does not answer: perhaps it is being replaced. The log has the reason: it may name
    hosts, which are nothing for users."""

    def __init__(self, what: str) -> None:
        super().__init__(
            503,
            f"the {what} cannot be reached now; try again later",
            "store_unavailable",
            RETRY_AFTER,
        )


class StoreCalls:
    """Calls of one method of `StoreService`."""

    def __init__(self, method: Any, what: str) -> None:
        """`method`: of the store's handle. `what` it keeps, as errors name it."""
        self._method = method
        self._what = what
        self._failures = 0
        """Calls in a row that were not answered."""
        self._log = StructuredLogger("cluster.ingress")

    async def call(self, request: Any) -> Any:
        """Any failure of the call raises `StoreUnavailable`."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = await self._method.remote(request)
        except Exception as error:  # any error of the call
            self._failures += 1
            if self._failures.bit_count() == 1:  # the first, the second, the fourth ...
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self._log.warning("no answer of the store", failures=self._failures, error=reason)
            raise StoreUnavailable(self._what) from None
        self._failures = 0
        return reply
