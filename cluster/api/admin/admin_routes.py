"""The admin routes of one ingress. They call the manager, which decides, and the engines."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin import change_requests as changes
from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.admin.manager_calls import call_manager
from swell.cluster.api.bodies.body_reader import read_short_body
from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.endpoints import Handler, json_response, route
from swell.cluster.api.services import Services
from swell.cluster.client.engine_core_client import EngineCallFailed
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.schema.strict_json import check_strict
from swell.configs.error_text import shown

_ENGINE_CALL_TIMEOUT_S = 10.0
"""The timeout of a call to an engine, which answers between two steps."""
_MAX_BODY_BYTES = 64 * 1024
"""The maximum size of a request body."""


_CHANGES: dict[str, type[RequestBody]] = {
    "scale": changes.ScaleRequest,
    "drain": changes.DrainRequest,
    "upgrade": changes.UpgradeRequest,
    "update_weights": changes.WeightsRequest,
    "pause": changes.SwitchRequest,
    "resume": changes.SwitchRequest,
    "sleep": changes.SleepRequest,
    "wake": changes.SwitchRequest,
    "reset_prefix_cache": changes.SwitchRequest,
}
"""Methods of the manager, and the bodies whose fields are their arguments."""


_LEVEL = re.compile("0|[1-9][0-9]{0,8}")
_EMPTY: list[list[bytes]] = [[], [b"{}"], [b"{", b"}"]]
"""Bodies without fields, split at white space."""
_QUERIES = {"sleep": ("level", "requests")}
"""Fields that may be query parameters instead of a body, as in vLLM."""


def _from_query(request: Request) -> bytes:
    """Returns a JSON body with the query parameters as fields; a repeated parameter becomes a
    repeated field."""
    fields = [
        f"{json.dumps(name)}:{value if _LEVEL.fullmatch(value) else json.dumps(value)}"
        for name, value in request.query_params.multi_items()
    ]
    return f"{{{','.join(fields)}}}".encode()


def check_literal(request: Request, path: str) -> None:
    """Raises HTTPError 404 unless the URL has the path of the route, up to its parameter, without
    percent-encoding: a proxy that blocks the routes of operators may compare the encoded text."""
    sent = request.scope.get("raw_path", b"").decode("latin-1")
    sent = sent.removeprefix(request.scope.get("root_path", ""))
    literal, parameter, _ = path.partition("{")
    if not (sent.startswith(literal) if parameter else sent.removesuffix("/") == literal):
        raise HTTPError(
            404,
            f"{shown(sent)} does not exist; write {literal} without percent-encoding",
            "not_found",
        )


class AdminRoutes:
    """The routes with which operators change and inspect the cluster. The methods of
    `services.manager` that change it return a `ChangeResult`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            self._route("/admin/cluster", self._cluster, "GET"),
            self._route("/admin/idle", self._idle, "GET"),
            self._route("/admin/requests/{id:path}", self._request, "GET"),
            *(
                self._route(
                    f"/admin/{method}",
                    partial(self._change, method, kind),
                    "POST",
                    *_QUERIES.get(method, ()),
                )
                for method, kind in _CHANGES.items()
            ),
        ]

    def _route(self, path: str, handler: Handler, method: str, *query: str) -> Route:
        """Returns a route that only operators may use. `query` names the parameters that it
        accepts."""

        async def run(request: Request) -> Response:
            check_literal(request, path)
            self._services.access.check_admin(request)
            checked_query(request, *query)
            return await handler(request)

        return route(path, run, method)

    async def _cluster(self, request: Request) -> Response:
        return json_response(await self._call_manager("describe"))

    async def _idle(self, request: Request) -> Response:
        """Asks every engine whether all its slots and blocks are free (the conservation check)."""
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
        """Returns the timeline of a request, no matter which ingress served it."""
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
            f"there is no request {shown(id)}: each ingress remembers the requests that run, and "
            f"the last {limits.request_history} that finished (serve.request_history) for "
            f"{limits.request_history_s:g} s (serve.request_history_s), until it stops; send the "
            "id of the response, or its x-request-id",
            "request_not_found",
        )

    async def _change(self, method: str, kind: type[RequestBody], request: Request) -> Response:
        body = await read_short_body(request, _MAX_BODY_BYTES)
        if kind in (changes.SwitchRequest, changes.SleepRequest) and body.split() in _EMPTY:
            body = _from_query(request)
        elif request.query_params:
            name = next(iter(request.query_params))
            raise BadRequest(
                "send the fields either in the query or in the body, not in both", name
            )
        check_strict(body)
        arguments = msgspec.structs.astuple(decode(body, kind))
        change: admin.ChangeResult = await self._call_manager(method, *arguments)
        if change.refusal is None:
            kept, version = change.kept or UNSET, change.version or UNSET
            accepted = admin.Accepted(
                target=change.target, stored=change.is_stored, kept=kept, version=version
            )
            return json_response(accepted, 202)
        raise HTTPError(400, change.refusal, "refused")

    async def _call_manager(self, method: str, *args: object) -> Any:
        return await call_manager(self._services.manager, method, *args)
