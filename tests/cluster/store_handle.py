"""The store of an application in the test's process, with handles like those of Ray Serve."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from swell.cluster.api.store import session_store
from swell.cluster.api.store.session_store import ReportSessions, SessionStore
from swell.cluster.api.store.store_service import StoreService
from swell.configs.serve import ServeConfig, SessionLimits


def old_store(limits: SessionLimits, now_s: float) -> SessionStore:
    """Returns a store that has recovered."""
    store = SessionStore(limits, now_s - session_store.RECOVERY_S)
    grow_old(store, now_s - session_store.RECOVERY_S)
    return store


def grow_old(store: SessionStore, start_s: float) -> None:
    """Sends requests to a store that was started at `start_s` until it has recovered."""
    reports = round(session_store.RECOVERY_S / session_store.REPORT_S)
    for number in range(1, reports + 1):
        store.handle(ReportSessions([], []), start_s + number * session_store.REPORT_S)


class StoreOfTest:
    """A store that has run for a long time. While `is_away`, every call fails."""

    def __init__(self, **limits: Any) -> None:
        self.limits = ServeConfig(**limits)
        self.is_away = False
        self.loses: type[Any] | None = None
        """The reply to the next request of this type is lost."""
        self.restart()
        self.service._sessions = old_store(self.limits, time.monotonic())

    def restart(self) -> None:
        """Replaces the store by an empty one that recovers."""
        self.service = StoreService(self.limits)

    def new_handle(self) -> SimpleNamespace:
        return SimpleNamespace(handle=SimpleNamespace(remote=self._handle))

    async def _handle(self, request: Any) -> Any:
        self._check()
        reply = await self.service.handle(request)
        if self.loses is not None and isinstance(request, self.loses):
            self.loses = None
            raise ConnectionError("the answer was lost")
        return reply

    def _check(self) -> None:
        if self.is_away:
            raise ConnectionError("no store")
