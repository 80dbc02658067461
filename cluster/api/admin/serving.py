"""The admin routes of one ingress: it calls the manager, which decides, and the engines."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.body_reader import read_short_body
from swell.cluster.api.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.routing import Handler, json_response, route
from swell.cluster.api.services import Services
from swell.cluster.client.engine_core_client import EngineCallFailed
from swell.cluster.text.sampling_params import shown
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import RequestBody

_ENGINE_CALL_TIMEOUT_S = 10.0
"""How long an engine may take to answer a call: it answers between steps."""
_MANAGER_TIMEOUT_S = 30.0
"""How long the manager may take: longer than Serve needs to replace it."""
_MAX_BODY_BYTES = 64 * 1024
"""The longest body of a request."""


_CHANGES: dict[str, type[RequestBody]] = {
    "scale": admin.ScaleRequest,
    "drain": admin.DrainRequest,
    "upgrade": admin.UpgradeRequest,
    "pause": admin.SwitchRequest,
    "resume": admin.SwitchRequest,
}
"""Method of the manager, whose arguments are the fields of the body."""


class AdminRoutes:
    """The routes by which operators change and inspect the cluster. `services.manager` answers with
    a `ChangeResult`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        changes = [
            route(f"/admin/{method}", self._admin_only(partial(self._change, method, kind)), "POST")
            for method, kind in _CHANGES.items()
        ]
        return [
            route("/admin/cluster", self._admin_only(self._cluster), "GET"),
            route("/admin/idle", self._admin_only(self._idle), "GET"),
            route("/admin/requests/{id:path}", self._admin_only(self._request), "GET"),
            *changes,
        ]

    def _admin_only(self, handler: Handler) -> Handler:
        async def run(request: Request) -> Any:
            self._services.access.check_admin(request)
            return await handler(request)

        return run

    async def _cluster(self, request: Request) -> Response:
        return json_response(await self._call_manager("describe"))

    async def _idle(self, request: Request) -> Response:
        """Check with every engine whether all its slots and blocks are free: the conservation
        check."""
        llm, engines = self._services.llm, []
        for rank in llm.view.roster.ranks:
            reason = None
            try:
                await llm.call_engine(rank, "check_idle", timeout_s=_ENGINE_CALL_TIMEOUT_S)
            except (EngineCallFailed, TimeoutError) as error:
                reason = str(error) or "busy"
            engines.append(admin.IdleEngine(rank=rank, idle=reason is None, reason=reason))
        return json_response(admin.IdleReport(engines=engines))

    async def _request(self, request: Request) -> Response:
        """What happened to a request, whichever ingress served it."""
        id, services = request.path_params["id"], self._services
        theirs, complete = await services.peers.find(id, services.llm.client_index)
        found = [*services.recorder.find(id), *theirs]
        if found:
            found.sort(key=lambda story: story.timings.received_at)
            return json_response(admin.RequestStories(requests=found, complete=complete))
        if not complete:
            raise HTTPError(
                503,
                f"the request {shown(id)} is not known here, and another ingress did not answer; "
                "try again later",
                "ingress_silent",
                RETRY_AFTER,
            )
        limits = services.config.serve
        raise HTTPError(
            404,
            f"there is no request {shown(id)}: a request is known while it runs and for "
            f"{limits.request_history_s:g} s after its end (serve.request_history_s), the last "
            f"{limits.request_history} of each ingress (serve.request_history), and as long as the "
            "ingress that served it lives; the id is that of the answer, or its x-request-id",
            "request_not_found",
        )

    async def _change(self, method: str, kind: type[RequestBody], request: Request) -> Response:
        body = await read_short_body(request, _MAX_BODY_BYTES)
        if kind is admin.SwitchRequest and not body.strip():
            body = b"{}"
        arguments = msgspec.structs.astuple(decode(body, kind))
        change: admin.ChangeResult = await self._call_manager(method, *arguments)
        if change.refusal is None:
            return json_response(
                admin.Accepted(target=change.target, kept=change.kept or UNSET), 202
            )
        raise HTTPError(400, change.refusal, "refused")

    async def _call_manager(self, method: str, *args: object) -> Any:
        """Call the manager. Raises HTTPError 503 if it does not answer: Serve may be replacing
        it."""
        try:
            async with asyncio.timeout(_MANAGER_TIMEOUT_S):
                return await getattr(self._services.manager, method).remote(*args)
        except Exception as error:  # any error of the call
            late = isinstance(error, TimeoutError)
            reason = f"within {_MANAGER_TIMEOUT_S:g} s" if late else repr(error)
            raise HTTPError(
                503,
                f"the manager did not answer: {reason}; it may be restarting. The request may "
                "have been accepted all the same: see GET /admin/cluster, and try again",
                "no_manager",
                RETRY_AFTER,
            ) from None
