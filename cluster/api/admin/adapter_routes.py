"""Routes with which operators load and unload adapters (LoRA) while the server runs, compatible
with vLLM. The ingress checks the files, the manager keeps the names, and engines load an adapter
when it is first used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin import change_requests as changes
from swell.cluster.api.admin.admin_routes import check_literal
from swell.cluster.api.admin.manager_calls import call_manager
from swell.cluster.api.admin.protocol import NOT_STORED, ChangeResult
from swell.cluster.api.bodies.body_reader import read_short_body
from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.endpoints import route
from swell.cluster.api.services import Services
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.schema.strict_json import check_strict
from swell.configs.error_text import shown
from swell.configs.files.adapter_files import check_adapter
from swell.configs.lora import Adapter
from swell.configs.runtime.hanging_calls import HangingCalls, TooManyCalls
from swell.configs.schema import ConfigError

Body = TypeVar("Body", bound=RequestBody)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_MAX_BODY_BYTES = 64 * 1024
"""The maximum size of a request body."""
_MAX_READS = 8
"""The most concurrent reads of adapter files; some of them may hang."""
_FILES_TIMEOUT_S = 60.0
"""The timeout for reading the files of an adapter."""
_VIEW_TIMEOUT_S = 5.0
"""How long a response waits until this ingress has seen the change: several heartbeats."""
_VIEW_POLL_S = 0.01


class AdapterRoutes:
    """The routes. The methods of `services.manager` return a `ChangeResult`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._reads = HangingCalls("swell-adapter-check", _MAX_READS)

    def routes(self) -> list[Route]:
        return [
            route(LOAD, self._load, "POST"),
            route(UNLOAD, self._unload, "POST"),
        ]

    async def _load(self, request: Request) -> Response:
        body = await self._read(request, LOAD, changes.LoadAdapterRequest)
        names, name = self._services.adapters, body.lora_name
        if name == self._services.model or name in names.of_config:
            raise BadRequest(
                f"the name {shown(name)} belongs to the model or to an adapter of lora.adapters, "
                "which cannot be replaced; choose another name",
                "lora_name",
                "name_taken",
            )
        if not body.load_inplace and names.find(name) is not None:
            raise _refused(
                f"the lora adapter {shown(name)} has already been loaded; unload it first, or set "
                "load_inplace"
            )
        adapter = await self._check_files(name, body.lora_path)
        change = await call_manager(
            self._services.manager, "load_adapter", adapter, body.load_inplace
        )
        if change.refusal is not None:
            raise _refused(change.refusal)
        await self._until_seen(lambda: names.find(name) == adapter)
        return _success(f"LoRA adapter '{name}' added", change)

    async def _unload(self, request: Request) -> Response:
        body = await self._read(request, UNLOAD, changes.UnloadAdapterRequest)
        names, name = self._services.adapters, body.lora_name
        change = await call_manager(self._services.manager, "unload_adapter", name)
        if change.refusal is not None:
            if names.find(name) is not None:
                raise _refused(change.refusal)
            raise HTTPError(
                404,
                f"the lora adapter {shown(name)} cannot be found: {change.refusal}",
                "adapter_not_found",
            )
        await self._until_seen(lambda: names.find(name) is None)
        return _success(f"LoRA adapter '{name}' removed", change)

    async def _read(self, request: Request, path: str, kind: type[Body]) -> Body:
        check_literal(request, path)
        self._services.access.check_admin(request)
        checked_query(request)
        raw = await read_short_body(request, _MAX_BODY_BYTES)
        check_strict(raw)
        body = decode(raw, kind)
        if not self._services.config.lora.enabled:
            raise HTTPError(
                403,
                "adapters cannot be loaded or unloaded here: lora.enabled=false; set "
                "lora.enabled=true, or list the adapters in lora.adapters",
                "lora_disabled",
            )
        return body

    async def _check_files(self, name: str, folder: str) -> Adapter:
        """Checks the files of the adapter. Raises BadRequest and HTTPError 503."""
        max_rank = self._services.config.lora.max_rank
        try:
            read = self._reads.submit(partial(check_adapter, name, folder, max_rank))
            async with asyncio.timeout(_FILES_TIMEOUT_S):
                return await asyncio.wrap_future(read)
        except ConfigError as error:
            raise BadRequest(f"lora_path: {error}", "lora_path", "invalid_adapter") from None
        except TooManyCalls as error:
            raise HTTPError(503, f"lora_path: {error}", "too_many_reads", RETRY_AFTER) from None
        except TimeoutError:
            raise HTTPError(
                503,
                f"the files of lora_path={shown(folder)} were not read within "
                f"{_FILES_TIMEOUT_S:g} s; its file system may hang, try again later",
                "adapter_files_silent",
                RETRY_AFTER,
            ) from None

    async def _until_seen(self, condition: Callable[[], object]) -> None:
        """Waits for the view of the cluster that has the change; other ingresses receive it at the
        same time. The manager has accepted the change in any case. Raises HTTPError 503."""
        try:
            async with asyncio.timeout(_VIEW_TIMEOUT_S):
                while not condition():
                    await asyncio.sleep(_VIEW_POLL_S)
        except TimeoutError:
            raise HTTPError(
                503,
                "the manager has accepted the change, but this ingress did not see it within "
                f"{_VIEW_TIMEOUT_S:g} s; check GET /v1/models",
                "no_view",
                RETRY_AFTER,
            ) from None


def _refused(reason: str) -> HTTPError:
    return HTTPError(400, reason, "refused")


def _success(what: str, change: ChangeResult) -> Response:
    note = "" if change.is_stored else f" But {NOT_STORED}."
    return Response(f"Success: {what} successfully.{note}", media_type="text/plain")
