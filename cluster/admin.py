"""The admin routes of one ingress: it asks the manager, who decides, and the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.async_llm import AsyncLLM, EngineCallFailed
from swell.cluster.description import Change
from swell.cluster.http import HTTPError, KeyRing, json_response, read_json_body, route
from swell.cluster.openai.admin import (
    Accepted,
    DrainRequest,
    IdleEngine,
    IdleReport,
    ScaleRequest,
)
from swell.cluster.openai.decode import decode

_CALL_S = 10.0
"""How long an engine may take to answer a call: it answers between steps."""


class AdminRoutes:
    """What operators may ask. `manager` answers with a `Change`."""

    def __init__(
        self, admins: KeyRing, manager: Any, llm: Callable[[], AsyncLLM], *, max_body_bytes: int
    ) -> None:
        self._admins = admins
        self._manager = manager
        self._llm = llm
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            route("/admin/cluster", self._cluster, "GET"),
            route("/admin/idle", self._idle, "GET"),
            route("/admin/scale", self._scale, "POST"),
            route("/admin/drain", self._drain, "POST"),
            route("/admin/pause", self._pause, "POST"),
            route("/admin/resume", self._resume, "POST"),
        ]

    async def _cluster(self, request: Request) -> Response:
        self._admins.check(request)
        return json_response(await self._manager.describe.remote())

    async def _idle(self, request: Request) -> Response:
        """Ask every engine whether all its slots and blocks are free: the conservation check."""
        self._admins.check(request)
        llm, engines = self._llm(), []
        for rank in llm.view.roster.ranks:
            reason = None
            try:
                await llm.call_engine(rank, "check_idle", timeout_s=_CALL_S)
            except (EngineCallFailed, TimeoutError) as error:
                reason = str(error) or "busy"
            engines.append(IdleEngine(rank=rank, idle=reason is None, reason=reason))
        return json_response(IdleReport(engines=engines))

    async def _scale(self, request: Request) -> Response:
        self._admins.check(request)
        body = decode(await read_json_body(request, self._max_body_bytes), ScaleRequest)
        return _accepted(await self._manager.scale.remote(body.engines, body.drain_timeout_s))

    async def _drain(self, request: Request) -> Response:
        self._admins.check(request)
        body = decode(await read_json_body(request, self._max_body_bytes), DrainRequest)
        return _accepted(await self._manager.drain.remote(body.rank))

    async def _pause(self, request: Request) -> Response:
        self._admins.check(request)
        return _accepted(await self._manager.pause.remote())

    async def _resume(self, request: Request) -> Response:
        self._admins.check(request)
        return _accepted(await self._manager.resume.remote())


def _accepted(change: Change) -> Response:
    if change.refusal is None:
        return json_response(Accepted(target=change.target), 202)
    raise HTTPError(400, change.refusal, "refused")
