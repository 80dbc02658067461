"""The process that keeps responses and sessions: `ResponseStore` and `SessionStore` with a clock.
`cluster/app.py` deploys it."""

from __future__ import annotations

import time

from swell.cluster.api.store.response_store import ResponseReply, ResponseRequest, ResponseStore
from swell.cluster.api.store.session_store import SessionAnswer, SessionRequest, SessionStore
from swell.configs.runtime.log import configure_logging
from swell.configs.serve import ServeConfig

StoreRequest = ResponseRequest | SessionRequest


class StoreService:
    """One store for all ingresses of an application. Its data is lost with its process: ingresses
    then restart their background responses at its successor, and upload their sessions again."""

    def __init__(self, limits: ServeConfig) -> None:
        configure_logging()
        self._responses = ResponseStore(
            limits.stored_responses, limits.stored_response_bytes, limits.stored_response_age_s
        )
        self._sessions = SessionStore(limits, time.monotonic())

    async def handle(self, request: StoreRequest) -> ResponseReply | SessionAnswer:
        if isinstance(request, SessionRequest):
            return self._sessions.handle(request, time.monotonic())
        return self._responses.handle(request, time.monotonic())
