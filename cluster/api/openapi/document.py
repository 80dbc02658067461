"""The OpenAPI description of every route, made from the very types that the routes use."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec

from swell.cluster.api import tokenize
from swell.cluster.api.admin import change_requests as changes
from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.chat import protocol as chat
from swell.cluster.api.completions import protocol as completions
from swell.cluster.api.messages import protocol as anthropic
from swell.cluster.api.messages.message import Message, MessagesError, StreamEvent, TokenCount
from swell.cluster.api.openapi.fields import annotate_fields, annotate_limits
from swell.cluster.api.pooling import protocol as pooling
from swell.cluster.api.protocol_base import ErrorBody
from swell.cluster.api.responses import protocol as responses
from swell.cluster.api.responses.events import ResponseEvent
from swell.cluster.api.responses.response import ResponseBody, ResponseDeleted, ResponseItemList
from swell.cluster.api.resumable.event_id import LAST_EVENT_ID
from swell.cluster.api.resumable.resumable_request import IDEMPOTENCY_KEY, MAX_KEY_CHARS
from swell.cluster.client import deadline
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.schema.unknown_fields import UnknownFields

_SCHEMAS = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"

_ERRORS = {
    400: "A field, a parameter or a header is wrong; the message names it, its value and the "
    "limit.",
    401: "The key is missing or unknown.",
    403: "The server is not known by this name (`serve.allowed_hosts`); of the admin API also: the "
    "origin is not allowed (`serve.allowed_origins`), or there are no keys of operators.",
    404: "The model, the stored response, or the request does not exist.",
    408: "The request did not come in time (`serve.head_timeout_s`, `serve.transfer_timeout_s`), "
    "or its answer was not complete in the time of the header `x-request-timeout-s`.",
    409: "The answer that is to be continued was begun by a version of the weights that no engine "
    "has any more.",
    413: "The body is longer than `serve.max_body_bytes`.",
    415: "The content type is not application/json, or the content encoding none of gzip and "
    "deflate.",
    422: "The `idempotency-key` was used for another request, or the `last-event-id` is of another "
    "answer.",
    429: "More requests wait than `serve.max_waiting_requests`, or more of their tokens than "
    "`serve.max_waiting_tokens`; the header `retry-after` says when to come back.",
    500: "An engine failed and the request could not be moved.",
    503: "No engine came in time, stored responses or another ingress cannot be reached now, or "
    "there are too many connections or bodies; try again later.",
    529: "No engine came in time; try again later.",
}
_KEY_ERRORS = (400, 401, 403)
_BODY_ERRORS = (*_KEY_ERRORS, 408, 413, 415)
_ANSWER_ERRORS = (*_BODY_ERRORS, 404, 409, 422, 429, 500)
_TIMEOUT = {
    "name": deadline.HEADER,
    "in": "header",
    "required": False,
    "description": "Seconds for which the client waits for the answer; then the request ends.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": deadline.MAX_TIMEOUT_S},
}
_RESUMPTION = [
    {
        "name": IDEMPOTENCY_KEY,
        "in": "header",
        "required": False,
        "description": "Names the answer: a request with the same key, caller, path and body gets "
        "the same answer, while it is computed and for `serve.resumable_age_s` after; events of "
        "its stream have ids.",
        "schema": {"type": "string", "pattern": "^[!-~]+$", "maxLength": MAX_KEY_CHARS},
    },
    {
        "name": LAST_EVENT_ID,
        "in": "header",
        "required": False,
        "description": "The id of the last event that came of a stream with an `idempotency-key`: "
        "the answer has those behind it.",
        "schema": {"type": "string"},
    },
]
_ENGINES = {
    "x-swell-engine": {
        "description": "Ranks of the engines that served, in order, comma-separated. A stream that "
        "moved later says them all in a comment before its end: `: x-swell-engine 0,1`.",
        "schema": {"type": "string"},
    },
    "x-swell-version": {
        "description": "The version of weights and limits that gave the whole answer, as in "
        "`system_fingerprint` and `/admin/cluster`.",
        "schema": {"type": "string"},
    },
}


class Operation(NamedTuple):
    """One method of one route. `answer` is a type, or the media type of an answer without one."""

    method: str
    path: str
    summary: str
    answer: type | str
    body: type[RequestBody] | None = None
    chunk: Any = None
    """What one event of a stream holds, where the answer may be streamed."""
    errors: tuple[int, ...] = ()
    status: int = 200
    error: type = ErrorBody
    events: str = (
        "With `stream: true`: events `data: JSON`, each a chunk or, after a failure, an error; the "
        "last one is `data: [DONE]`."
    )
    named_events: bool = False
    """Whether an event's type is beside its data; such streams have no `[DONE]`."""


_show = partial(Operation, "get", errors=_KEY_ERRORS)
_answer = partial(Operation, "post", errors=(*_ANSWER_ERRORS, 503))
_stored = partial(Operation, errors=(*_KEY_ERRORS, 404, 503))
_convert = partial(Operation, "post", errors=(*_BODY_ERRORS, 404, 503))
_change = partial(Operation, "post", answer=admin.Accepted, errors=(*_BODY_ERRORS, 503), status=202)

OPERATIONS = (
    Operation("get", "/health", "Whether the process is up.", admin.Health),
    Operation("get", "/ready", "Whether an engine can answer.", admin.Readiness, errors=(503,)),
    Operation("get", "/metrics", "Metrics for Prometheus.", "text/plain"),
    Operation("get", "/ping", "As `/health`.", admin.Health),
    Operation("post", "/ping", "As `/health`.", admin.Health),
    Operation("get", "/version", "The server's version.", admin.Version),
    Operation("get", "/load", "How many requests are in the engines.", admin.ServerLoad),
    _show("/server_info", "How the model is served.", admin.ServerInfo),
    Operation("get", "/openapi.json", "This document.", _JSON),
    _show("/v1/models", "The models served.", admin.ModelList),
    _show("/v1/models/{model}", "One model.", admin.ModelCard, errors=(*_KEY_ERRORS, 404)),
    _answer(
        "/v1/completions",
        "Continue texts or token ids.",
        completions.Completion,
        completions.CompletionRequest,
        completions.CompletionChunk,
    ),
    _answer(
        "/v1/chat/completions",
        "Answer a conversation.",
        chat.ChatCompletion,
        chat.ChatCompletionRequest,
        chat.ChatChunk,
    ),
    _answer(
        "/v1/responses",
        "Answer a conversation in items, and keep the answer for later.",
        ResponseBody,
        responses.ResponsesRequest,
        ResponseEvent,
        events="With `stream: true`: events `event: TYPE` and `data: JSON`; the last one is "
        "`response.completed`, `response.incomplete` or `response.failed`.",
        named_events=True,
    ),
    _stored(
        "get",
        "/v1/responses/{id}",
        "A stored response, or how far one in the background is.",
        ResponseBody,
    ),
    _stored("delete", "/v1/responses/{id}", "Forget a stored response.", ResponseDeleted),
    _stored("post", "/v1/responses/{id}/cancel", "End a response in the background.", ResponseBody),
    _stored(
        "get",
        "/v1/responses/{id}/input_items",
        "What a stored response was given, in pages.",
        ResponseItemList,
    ),
    _answer(
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does.",
        Message,
        anthropic.MessagesRequest,
        StreamEvent,
        errors=(*_ANSWER_ERRORS, 529),
        error=MessagesError,
        events="With `stream: true`: events `event: TYPE` and `data: JSON`; after a failure the "
        "last one is an error.",
        named_events=True,
    ),
    _convert(
        "/v1/messages/count_tokens",
        "How many tokens a conversation is to the model.",
        TokenCount,
        anthropic.CountTokensRequest,
        errors=(*_BODY_ERRORS, 404, 529),
        error=MessagesError,
    ),
    _answer(
        "/v1/embeddings",
        "The embeddings of texts, by a model that gives embeddings.",
        pooling.EmbeddingList,
        pooling.EmbeddingRequest,
    ),
    *(
        _answer(
            path,
            "The probabilities of classes of texts, by a model with a classification head.",
            pooling.ClassificationList,
            pooling.ClassifyRequest,
        )
        for path in ("/classify", "/v1/classify")
    ),
    *(
        _answer(
            path,
            "The scores of pairs of texts, by a cross-encoder or by cosines of embeddings.",
            pooling.ScoreList,
            pooling.ScoreRequest,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        _answer(
            path,
            "Documents by their scores with a query, the best first.",
            pooling.RerankResponse,
            pooling.RerankRequest,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    _convert(
        "/tokenize",
        "The token ids of a text or a conversation.",
        tokenize.TokenizeResponse,
        tokenize.TokenizeRequest,
    ),
    _convert(
        "/detokenize",
        "The text of token ids.",
        tokenize.DetokenizeResponse,
        tokenize.DetokenizeRequest,
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Let requests name an adapter (LoRA) as their model, at every ingress.",
        "text/plain",
        changes.LoadAdapterRequest,
        errors=(*_BODY_ERRORS, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Forget such an adapter; what has begun with it ends with it.",
        "text/plain",
        changes.UnloadAdapterRequest,
        errors=(*_BODY_ERRORS, 404, 503),
    ),
    _show("/admin/idle", "Whether all is free.", admin.IdleReport),
    _show("/admin/cluster", "The cluster's state.", admin.ClusterState, errors=(*_KEY_ERRORS, 503)),
    _show(
        "/admin/requests/{id}",
        "What happened to a request that runs or ended lately, by the id of its answer or its "
        "`x-request-id`, whichever ingress served it.",
        admin.RequestStories,
        errors=(*_KEY_ERRORS, 404, 503),
    ),
    _change("/admin/scale", "Grow or shrink to a number of engines.", body=changes.ScaleRequest),
    _change("/admin/drain", "Take one engine out when it has finished.", body=changes.DrainRequest),
    _change(
        "/admin/upgrade",
        "Replace the engines by those of another configuration, one after the other.",
        body=changes.UpgradeRequest,
    ),
    _change(
        "/admin/update_weights",
        "Let the engines have the weights of another folder, one after the other.",
        body=changes.WeightsRequest,
    ),
    _change(
        "/admin/pause", "Let all engines stop; requests wait in them.", body=changes.SwitchRequest
    ),
    _change("/admin/resume", "Let all engines go on.", body=changes.SwitchRequest),
    _change(
        "/admin/sleep",
        "Let all engines stop and give memory back, until they are woken up.",
        body=changes.SleepRequest,
    ),
    _change("/admin/wake", "Let engines that sleep go on.", body=changes.SwitchRequest),
)


@cache
def openapi_document(unknown: UnknownFields = "refuse") -> dict[str, Any]:
    """OpenAPI 3.1. Made once: no caller may change it. `unknown` is `serve.unknown_fields`."""
    types = [kind for one in OPERATIONS for kind in (one.answer, one.body, one.chunk, one.error)]
    kinds = [*dict.fromkeys(kind for kind in types if not isinstance(kind, str | None))]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    schema_of = dict(zip(kinds, references, strict=True))
    for kind in (completions.CompletionRequest, chat.ChatCompletionRequest):
        annotate_limits(schemas[kind.__name__])
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    annotate_fields(schemas, bodies, unknown)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Swell",
            "version": importlib.metadata.version("swell"),
            "description": "Large language models on a cluster that may change meanwhile. A path "
            "with a slash at its end is the one without; bodies may come as gzip or deflate.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Only where the server was given a file of keys.",
                },
                "x-api-key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, as Anthropic's clients send it.",
                },
            },
        },
    }


def _describe(operation: Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": operation.summary}
    if isinstance(operation.answer, str):
        shape = "object" if operation.answer == _JSON else "string"
        answer["content"] = {operation.answer: {"schema": {"type": shape}}}
    else:
        answer["content"] = {_JSON: {"schema": schema_of[operation.answer]}}
    if operation.chunk is not None:
        events = _event_schema(operation, schema_of)
        answer["content"][_EVENTS] = {"schema": events}
        answer["headers"] = _ENGINES
    responses = {str(operation.status): answer}
    for status in sorted(operation.errors):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: {"schema": schema_of[operation.error]}},
        }
    parts = re.findall(r"\w+", operation.path)
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method, *parts]),
        "summary": operation.summary,
        "responses": responses,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    if operation.chunk is not None:
        parameters += [_TIMEOUT, *_RESUMPTION]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {_JSON: {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if 401 in operation.errors:
        described["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return described


def _event_schema(operation: Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """One event of a stream, as an object of its fields: OpenAPI 3.1 does not say what the schema
    of an event stream describes, and readers of 3.1 take it for this."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [schema_of[operation.chunk], schema_of[operation.error]]},
    }
    properties = {"data": data}
    if operation.named_events:
        properties["event"] = {"type": "string"}
    else:
        properties["data"] = {"anyOf": [{"const": "[DONE]"}, data]}
    id = {"type": "string", "description": "Only of requests with an `idempotency-key`."}
    return {
        "type": "object",
        "description": operation.events,
        "properties": {**properties, "id": id},
        "required": sorted(properties),
    }
