"""The admin routes of one ingress: it calls the manager, which decides, and the engines."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin.protocol import (
    Accepted,
    ChangeResult,
    DrainRequest,
    IdleEngine,
    IdleReport,
    ScaleRequest,
    SwitchRequest,
)
from swell.cluster.api.body_reader import read_short_body
from swell.cluster.api.http_errors import HTTPError
from swell.cluster.api.routing import Handler, json_response, route
from swell.cluster.api.server.access import AccessRules
from swell.cluster.api.server.api_keys import ApiKeys
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_core_client import EngineCallFailed
from swell.cluster.text.schema.decode import decode
from swell.configs.schema import ServeConfig

_ENGINE_CALL_TIMEOUT_S = 10.0
"""How long an engine may take to answer a call: it answers between steps."""
_MANAGER_TIMEOUT_S = 30.0
"""How long the manager may take: longer than Serve needs to replace it."""
_MAX_BODY_BYTES = 64 * 1024
"""The longest body of a request."""


class AdminRoutes:
    """What operators may change and see. `manager` answers with a `ChangeResult`.

    An operator shows a key of `serve.admin_keys_file`. Where only `serve.api_keys_file` is set,
    these routes are closed: a user's key opens nothing here.
    """

    def __init__(
        self, config: ServeConfig, rules: AccessRules, manager: Any, llm: AsyncLLM
    ) -> None:
        self._admins = ApiKeys(config.admin_keys_file, "serve.admin_keys_file")
        self._admin_closed = config.admin_keys_file is None and config.api_keys_file is not None
        self._rules = rules
        self._manager = manager
        self._llm = llm

    def routes(self) -> list[Route]:
        return [
            route("/admin/cluster", self._require_admin(self._cluster), "GET"),
            route("/admin/idle", self._require_admin(self._idle), "GET"),
            route("/admin/scale", self._require_admin(self._scale), "POST"),
            route("/admin/drain", self._require_admin(self._drain), "POST"),
            route("/admin/pause", self._require_admin(self._pause), "POST"),
            route("/admin/resume", self._require_admin(self._resume), "POST"),
        ]

    def _require_admin(self, handler: Handler) -> Handler:
        async def run(request: Request) -> Any:
            self._rules.check_admin(request)
            if self._admin_closed:
                raise HTTPError(
                    403,
                    "the admin API is closed: serve.api_keys_file is set, and keys of users open "
                    "nothing here; set serve.admin_keys_file to a file with keys of operators",
                    "no_admin_keys",
                )
            self._admins.check(request)
            return await handler(request)

        return run

    async def _cluster(self, request: Request) -> Response:
        return json_response(await self._call_manager("describe"))

    async def _idle(self, request: Request) -> Response:
        """Check with every engine whether all its slots and blocks are free: the conservation
        check."""
        llm, engines = self._llm, []
        for rank in llm.view.roster.ranks:
            reason = None
            try:
                await llm.call_engine(rank, "check_idle", timeout_s=_ENGINE_CALL_TIMEOUT_S)
            except (EngineCallFailed, TimeoutError) as error:
                reason = str(error) or "busy"
            engines.append(IdleEngine(rank=rank, idle=reason is None, reason=reason))
        return json_response(IdleReport(engines=engines))

    async def _scale(self, request: Request) -> Response:
        body = decode(await read_short_body(request, _MAX_BODY_BYTES), ScaleRequest)
        return _accepted(await self._call_manager("scale", body.engines, body.drain_timeout_s))

    async def _drain(self, request: Request) -> Response:
        body = decode(await read_short_body(request, _MAX_BODY_BYTES), DrainRequest)
        return _accepted(await self._call_manager("drain", body.rank))

    async def _pause(self, request: Request) -> Response:
        await _check_empty_body(request)
        return _accepted(await self._call_manager("pause"))

    async def _resume(self, request: Request) -> Response:
        await _check_empty_body(request)
        return _accepted(await self._call_manager("resume"))

    async def _call_manager(self, method: str, *args: object) -> Any:
        """Raises HTTPError 503 where it gives no answer: Serve may be replacing it."""
        try:
            async with asyncio.timeout(_MANAGER_TIMEOUT_S):
                return await getattr(self._manager, method).remote(*args)
        except Exception as error:  # whatever keeps it from answering
            reason = (
                f"within {_MANAGER_TIMEOUT_S:g} s"
                if isinstance(error, TimeoutError)
                else repr(error)
            )
            raise HTTPError(
                503,
                f"the manager did not answer: {reason}; it may be restarting. What was asked may "
                "have been taken all the same: see GET /admin/cluster, and try again",
                "no_manager",
                "server_error",
                {"retry-after": "1"},
            ) from None


async def _check_empty_body(request: Request) -> None:
    """An empty object, or an empty body."""
    body = await read_short_body(request, _MAX_BODY_BYTES)
    if body.strip():
        decode(body, SwitchRequest)


def _accepted(change: ChangeResult) -> Response:
    if change.refusal is None:
        return json_response(Accepted(target=change.target), 202)
    raise HTTPError(400, change.refusal, "refused")
