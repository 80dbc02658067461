"""Polls the manager for the state of the cluster. No decisions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from swell.cluster.api.admin.protocol import ClusterState

_TIMEOUT_S = 5.0
"""The timeout of a call: longer than the manager itself waits for a coordinator."""


class ManagerPoll:
    """The newest answer of the manager. Not more than one call is in progress."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._call: asyncio.Task[ClusterState] | None = None
        self.newest: ClusterState | None = None
        """None: there was no answer yet."""
        self.at: float | None = None
        """The time of that answer, in seconds since 1970."""
        self.error: str | None = None
        """Why the last call failed."""

    async def refresh(self, wait_s: float) -> None:
        """Asks the manager, unless it is being asked, and waits for the answer, `wait_s` at
        most."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_task(self._ask())
        if (await asyncio.wait({self._call}, timeout=wait_s))[0]:
            call, self._call = self._call, None
            self._take(call)

    def close(self) -> None:
        """Ends a call in progress."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _ask(self) -> ClusterState:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await self._manager.describe.remote()
        return msgspec.convert(msgspec.to_builtins(answer), ClusterState)

    def _take(self, call: asyncio.Task[ClusterState]) -> None:
        try:
            self.newest, self.at, self.error = call.result(), time.time(), None
        except TimeoutError:
            self.error = f"no answer within {_TIMEOUT_S:g} s"
        except Exception as error:  # any error of the call
            self.error = f"{type(error).__name__}: {error}"
