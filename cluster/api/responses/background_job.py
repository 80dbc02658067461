"""What another ingress needs to compute a response in the background, should this one end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.responses.convert import chat_request
from swell.cluster.api.responses.items import Item
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.api.responses.response import ResponseBody
from swell.cluster.api.responses.response_store import Job, StoredResponse
from swell.cluster.api.routing import REQUEST_ID, request_id
from swell.cluster.api.serving_handler import TRACE_HEADERS
from swell.cluster.text.schema.decode import decode


def make_job(request: Request, body: ResponsesRequest) -> Job:
    """Small: what is not set is left out, and so is the input, which is kept as items."""
    fields = {
        name: value for name, value in msgspec.structs.asdict(body).items() if value is not None
    }
    headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    headers[REQUEST_ID] = request_id(request)
    return Job(
        msgspec.json.encode({**fields, "input": []}),
        [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
    )


def restore_job(
    job: Job, kept: StoredResponse
) -> tuple[ResponsesRequest, ResponseBody, ChatCompletionRequest]:
    """What another ingress had begun, as typed bodies."""
    body = decode(job.body, ResponsesRequest)
    response = msgspec.json.decode(kept.body, type=ResponseBody)
    return body, response, chat_request(body, (), items_of(kept))


def items_of(kept: StoredResponse) -> list[Item]:
    return msgspec.json.decode(kept.items, type=list[Item])


def detached_request(job: Job) -> Request:
    """The same request of a client that never leaves."""
    return Request({"type": "http", "headers": job.headers}, receive=_never_receive)


async def _never_receive() -> Any:
    await asyncio.get_running_loop().create_future()
