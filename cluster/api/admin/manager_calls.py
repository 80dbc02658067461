"""Calls to the manager, which Serve may be replacing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.engine.serving.start_timeline import StartPhase

_MANAGER_TIMEOUT_S = 30.0
"""The timeout of a call to the manager: longer than Serve needs to replace it."""


async def call_manager(manager: Any, method: str, *args: object) -> Any:
    """Returns the result of a method of the manager. Raises HTTPError 503 if the manager does not
    answer."""
    try:
        async with asyncio.timeout(_MANAGER_TIMEOUT_S):
            return await getattr(manager, method).remote(*args)
    except Exception as error:  # any error of the call
        late = isinstance(error, TimeoutError)
        reason = f"timeout after {_MANAGER_TIMEOUT_S:g} s" if late else repr(error)
        raise HTTPError(
            503,
            f"the manager did not answer: {reason}; it may be restarting. It may still have "
            "accepted the request: check GET /admin/cluster, then try again",
            "no_manager",
            RETRY_AFTER,
        ) from None


async def engine_starts(manager: Any) -> dict[int, list[StartPhase]]:
    """Returns the phases of the engines' starts by rank. Raises HTTPError 503 if the manager does
    not answer."""
    body = await call_manager(manager, "describe")
    return {
        engine["rank"]: msgspec.convert(engine["start"], list[StartPhase])
        for engine in body["engines"]
    }
