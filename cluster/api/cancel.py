"""The routes that cancel requests by their ids, at any ingress."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.endpoints import json_response, route
from swell.cluster.api.services import Services
from swell.cluster.client.requests.request_history import CancelStatus
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.runtime.secret import SecretText

MAX_IDS = 1000
MAX_ID_CHARS = 256
_BY_WEIGHT = (
    CancelStatus.NOT_FOUND,
    CancelStatus.UNKNOWN,
    CancelStatus.FINISHED,
    CancelStatus.CANCELLED,
)
"""If ingresses answer differently about an id, the last of these counts."""


class CancelRequest(RequestBody, kw_only=True):
    """Either one id or several: ids of answers, or their `x-request-id`."""

    request_id: str | None = None
    ids: list[str] | None = None

    def check(self) -> None:
        if (self.request_id is None) == (self.ids is None):
            field = "ids" if self.request_id else "request_id"
            raise BadRequest("send either 'request_id' or 'ids'", field)
        if self.request_id is not None:
            _check_id("request_id", self.request_id)
        if self.ids == []:
            raise bad_value("ids", self.ids, "must name at least one request")
        _check_ids("ids", self.ids or [])


class AbortRequest(RequestBody, kw_only=True):
    """vLLM's body."""

    request_ids: list[str]

    def check(self) -> None:
        _check_ids("request_ids", self.request_ids)


class CancelResult(Body, kw_only=True):
    id: str
    status: CancelStatus
    """cancelled; finished: it had finished before; not_found: no ingress knows it, or another key
    sent it; unknown: an ingress that may know it did not answer."""


class CancelResults(Body, kw_only=True):
    results: list[CancelResult]
    """One for each id, in the order of the request."""


class CancelRoutes:
    """The routes. A user cancels only the requests that were sent with the same key."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            route("/v1/cancel", self._cancel, "POST"),
            route("/abort_requests", self._abort, "POST"),
        ]

    async def _cancel(self, request: Request) -> Response:
        owner = self._services.authorize(request).owner
        body = await self._services.reader.read(request, CancelRequest)
        ids = body.ids or [str(body.request_id)]
        results = await self._end(ids, owner)
        statuses = {result.status for result in results}
        if statuses == {CancelStatus.NOT_FOUND}:
            raise HTTPError(
                404,
                "no ingress knows a request with this id: it was not accepted yet, it finished "
                "long ago, or another key sent it; send the id of the answer, or its x-request-id",
                "request_not_found",
            )
        if statuses <= {CancelStatus.NOT_FOUND, CancelStatus.UNKNOWN}:
            raise HTTPError(
                503,
                "the request is not known here, and another ingress did not answer; try again "
                "later",
                "ingress_silent",
                RETRY_AFTER,
            )
        return json_response(CancelResults(results=results))

    async def _abort(self, request: Request) -> Response:
        owner = self._services.authorize(request).owner
        body = await self._services.reader.read(request, AbortRequest)
        return json_response(CancelResults(results=await self._end(body.request_ids, owner)))

    async def _end(self, ids: Sequence[str], owner: SecretText) -> list[CancelResult]:
        """Cancels the requests with these ids at all ingresses."""
        services, ids = self._services, list(dict.fromkeys(ids))
        if not ids:
            return []
        here = services.recorder.cancel(ids, owner)
        theirs, complete = await services.peers.cancel(ids, owner, services.llm.client_index)
        least = CancelStatus.NOT_FOUND if complete else CancelStatus.UNKNOWN

        def result(id: str) -> CancelResult:
            found = (least, *(one[id] for one in (here, *theirs) if id in one))
            return CancelResult(id=id, status=max(found, key=_BY_WEIGHT.index))

        return [result(id) for id in ids]


def _check_ids(name: str, ids: Sequence[str]) -> None:
    check_length(name, ids, "ids", MAX_IDS)
    for index, id in enumerate(ids):
        _check_id(f"{name}[{index}]", id)


def _check_id(path: str, id: str) -> None:
    if not 0 < len(id) <= MAX_ID_CHARS:
        raise bad_value(path, id, f"must have 1 to {MAX_ID_CHARS} characters")
