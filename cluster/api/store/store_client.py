"""The client of an ingress for the process that keeps responses and sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.store.session_store import SessionReply
from swell.cluster.api.store.store_service import StoreRequest
from swell.configs.runtime.log import StructuredLogger

_CALL_TIMEOUT_S = 2.0
"""The timeout of a call to the store."""
_RETRY_S = 0.25


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


class StoreClient:
    """Calls the store for one kind of data. If the store is lost, it is replaced by an empty one
    (`ReportLoop`)."""

    def __init__(self, store: Any, what: str) -> None:
        """`store` is the handle of `StoreService`; None: nothing is kept. `what` names the data in
        error messages."""
        self._store = store
        self._what = what
        self._failures = 0
        """The number of consecutive calls without a reply."""
        self._log = StructuredLogger("cluster.ingress")

    async def call(self, request: StoreRequest) -> Any:
        """Returns the reply of the store; None also if nothing is kept. Any failure of the call
        raises `StoreUnavailable`."""
        if self._store is None:
            return None
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = await self._store.handle.remote(request)
        except Exception as error:  # any error of the call
            self._failures += 1
            if self._failures.bit_count() == 1:  # logs the first, second, fourth, ... failure
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                self._log.warning("the store did not answer", failures=self._failures, error=reason)
            raise StoreUnavailable(self._what) from None
        self._failures = 0
        return reply

    async def until_answered(self, request: StoreRequest, until_s: float = math.inf) -> Any:
        """Returns the reply like `call`. Repeats the call if the store does not answer, or is
        recovering, until `until_s` on the clock of the event loop. The store may handle a repeated
        request twice, so its second reply must say the same."""
        while True:
            try:
                reply = await self.call(request)
                error = StoreUnavailable(self._what)
            except StoreUnavailable as caught:
                reply, error = SessionReply.RECOVERING, caught
            if reply is not SessionReply.RECOVERING:
                return reply
            if asyncio.get_running_loop().time() >= until_s:
                raise error
            await asyncio.sleep(_RETRY_S)


class ReportLoop:
    """Reports to the store what this ingress works on, at an interval, also after a failed report.
    The reply tells what the store lacks, because it was restarted, and what others have
    replaced."""

    def __init__(self, report: Callable[[], Awaitable[None]]) -> None:
        self._report = report
        self._task: asyncio.Task[None] | None = None
        self._log = StructuredLogger("cluster.ingress")

    def start(self, interval_s: float) -> None:
        self._task = asyncio.create_task(self._run(interval_s))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._report()
            except StoreUnavailable:
                continue
            except Exception as error:  # the next report may succeed
                self._log.exception("report to the store", error)
