"""The process that keeps responses: `ResponseStore` with a clock. `cluster/app.py` deploys it."""

from __future__ import annotations

import time

from swell.cluster.api.responses.response_store import ResponseStore, StoreReply, StoreRequest
from swell.configs.log import configure_logging


class ResponseStoreService:
    """One for all ingresses of an application. What it keeps is lost with its process: ingresses
    begin their background responses again at its successor."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float) -> None:
        configure_logging()
        self._store = ResponseStore(limit, limit_bytes, limit_s)

    async def check_health(self) -> None:
        """Serve calls it in the event loop of the store: one that hangs does not answer, and is
        replaced."""

    async def handle(self, request: StoreRequest) -> StoreReply:
        return self._store.handle(request, time.monotonic())
