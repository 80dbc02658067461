"""The OpenAPI description of every route, generated from the types that the routes use.

Types do not express which fields come from other servers, where unknown fields are allowed, and the
ranges of numbers. These properties are added to the schemas; the ranges of sampling parameters are
the same ones that requests are checked against.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from swell.cluster.api.admin.change_requests import (
    DrainRequest,
    LoadAdapterRequest,
    ScaleRequest,
    SwitchRequest,
    UnloadAdapterRequest,
)
from swell.cluster.api.chat import protocol as chat
from swell.cluster.api.completions import protocol as completions
from swell.cluster.api.keep_alive import EARLY_HEAD
from swell.cluster.api.openapi.operations import JSON, OPERATIONS, Operation
from swell.cluster.api.resumable.event_id import LAST_EVENT_ID
from swell.cluster.api.resumable.resumable_request import IDEMPOTENCY_KEY, MAX_KEY_CHARS
from swell.cluster.client.requests import deadline
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.params.validate_params import RANGES, Integers, Numbers
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody, describe_neutral
from swell.cluster.text.schema.unknown_fields import UnknownFields

_SCHEMAS = "#/components/schemas/{name}"
_EVENTS = "text/event-stream"
_Schemas = dict[str, JsonSchema]
_OPERATORS = (
    DrainRequest,
    LoadAdapterRequest,
    ScaleRequest,
    SwitchRequest,
    UnloadAdapterRequest,
)
"""Bodies in which an unknown field is always refused."""
_LIMITS: dict[str, Numbers | Integers] = {
    **RANGES,
    "top_logprobs": RANGES["logprobs"],
    "truncate_prompt_tokens": Integers(-1, None),
    "priority": Integers(-(2**31), 2**31 - 1),
    "data_parallel_rank": Integers(0, 2**31 - 1),
}
del _LIMITS["max_tokens"]  # an echoed prompt may have 0 answer tokens

_ERRORS = {
    400: "A field, a parameter or a header is wrong; the message names it, its value and the "
    "limit.",
    401: "The key is missing or unknown.",
    403: "The host name of the request is not allowed (`serve.allowed_hosts`). For the admin API "
    "also: the origin is not allowed (`serve.allowed_origins`), or the server has no operator "
    "keys.",
    404: "The model, the stored response, the session, or the request does not exist.",
    408: "The request did not arrive in time (`serve.head_timeout_s`, "
    "`serve.transfer_timeout_s`), or its answer was not complete within the time in the "
    "header `x-request-timeout-s`.",
    409: "The answer to be continued was started by a version of the weights that no engine has "
    "any longer; or another chunk of the session started in the meantime; or `session_chunk` "
    "is above the number of chunks.",
    413: "The body is longer than `serve.max_body_bytes`.",
    415: "The content type is not application/json, or the content encoding is neither gzip nor "
    "deflate.",
    422: "The `idempotency-key` was used for another request, or the `last-event-id` belongs to "
    "another answer.",
    429: "`serve.max_waiting_requests` requests or `serve.max_waiting_tokens` of their tokens "
    "already wait, or the key already has `serve.sessions_per_key` sessions. The header "
    "`retry-after` has the seconds to wait before the next try.",
    500: "An engine failed and the request could not be moved to another one.",
    503: "No engine was ready in time; or stored responses, sessions or another ingress cannot be "
    "reached now; or there are too many connections, bodies or sessions. Try again later.",
    529: "No engine was ready in time. Try again later.",
}
_TIMEOUT = {
    "name": deadline.HEADER,
    "in": "header",
    "required": False,
    "description": "The time limit of the whole answer, in seconds; then the request is aborted.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": deadline.MAX_TIMEOUT_S},
}
_EARLY_HEAD = {
    "name": EARLY_HEAD,
    "in": "header",
    "required": False,
    "description": "If 1, the server sends status 200 and then a blank every `serve.keep_alive_s` "
    "while it computes an answer that is not streamed. An error after that is the body of the "
    "response with status 200.",
    "schema": {"type": "string", "enum": ["0", "1"]},
}
_RESUMPTION = [
    {
        "name": IDEMPOTENCY_KEY,
        "in": "header",
        "required": False,
        "description": "Makes the answer resumable: a request with the same key, caller, path and "
        "body gets the same answer, while it is computed and for `serve.resumable_age_s` "
        "afterwards. The events of its stream have ids.",
        "schema": {"type": "string", "pattern": "^[!-~]+$", "maxLength": MAX_KEY_CHARS},
    },
    {
        "name": LAST_EVENT_ID,
        "in": "header",
        "required": False,
        "description": "The id of the last event that the client received from a stream with an "
        "`idempotency-key`. The response continues with the event after it.",
        "schema": {"type": "string"},
    },
]
_ENGINES = {
    "x-swell-engine": {
        "description": "The ranks of the engines that served the request, in order, "
        "comma-separated. A stream that moved to another engine later, or whose head was sent "
        "before an engine was chosen, lists all of them in a comment before its end: `: "
        "x-swell-engine 0,1`.",
        "schema": {"type": "string"},
    },
    "x-swell-version": {
        "description": "The version of weights and limits that computed the whole answer, as in "
        "`system_fingerprint` and `/admin/cluster`.",
        "schema": {"type": "string"},
    },
}


@cache
def openapi_document(unknown: UnknownFields = "refuse") -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document. It is cached, so callers must not change it. `unknown` is
    `serve.unknown_fields`."""
    types = [kind for one in OPERATIONS for kind in (one.answer, one.body, one.chunk, one.error)]
    kinds = [*dict.fromkeys(kind for kind in types if not isinstance(kind, str | None))]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    schema_of = dict(zip(kinds, references, strict=True))
    for kind in (completions.CompletionRequest, chat.ChatCompletionRequest):
        _annotate_limits(schemas[kind.__name__])
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _annotate_fields(schemas, bodies, unknown)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Swell",
            "version": importlib.metadata.version("swell"),
            "description": "Serves large language models on a cluster whose size, weights and "
            "limits may change under load. A slash at the end of a path is ignored. Request "
            "bodies may be compressed with gzip or deflate.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed only if the server has a file of keys "
                    "(`serve.api_keys_file`, `serve.admin_keys_file`).",
                },
                "x-api-key": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, in the header that Anthropic's clients use.",
                },
            },
        },
    }


def _annotate_fields(
    schemas: _Schemas, bodies: Iterable[type[RequestBody]], unknown: UnknownFields
) -> None:
    for kind in _kinds(RequestBody):
        schema = schemas.get(kind.__name__)
        if schema is None:
            continue
        if issubclass(kind, HistoryPart):
            _open(schema, "Unknown fields are ignored.")
        elif unknown == "ignore" and kind not in _OPERATORS:
            _open(schema, "Unknown fields are ignored, and listed in the header `x-swell-warning`.")
    for kind in bodies:
        _annotate_ecosystem(kind, schemas[kind.__name__])


def _kinds(base: type[RequestBody]) -> Iterable[type[RequestBody]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _open(schema: JsonSchema, note: str) -> None:
    schema["additionalProperties"] = True
    schema["description"] = " ".join(filter(None, (schema.get("description"), note)))


def _annotate_ecosystem(kind: type[RequestBody], schema: JsonSchema) -> None:
    properties = schema["properties"]
    for name, neutral in kind.ECOSYSTEM.neutral.items():
        properties[name] = {"enum": [*neutral, None], "description": describe_neutral(neutral)}
    for name in sorted(kind.ECOSYSTEM.accepted):
        properties[name] = {"description": "Accepted, without an effect on the answer."}
    for name, target in kind.ECOSYSTEM.means.items():
        properties[name] = {**properties[target], "description": f"Another name of `{target}`."}


def _annotate_limits(schema: JsonSchema) -> None:
    """Writes the ranges of numbers into the schema of a request body."""
    for name, allowed in _LIMITS.items():
        field = schema["properties"].get(name, {})
        limits = {"minimum": allowed.low, "maximum": allowed.high}
        limits = {key: limit for key, limit in limits.items() if limit is not None}
        for form in field.get("anyOf", [field]):
            if form.get("type") in ("integer", "number"):
                form.update(limits)


def _describe(operation: Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": operation.summary}
    if operation.answer == _EVENTS:
        answer["content"] = {_EVENTS: {"schema": _event_schema(operation, schema_of)}}
    elif isinstance(operation.answer, str):
        shape = "object" if operation.answer == JSON else "string"
        answer["content"] = {operation.answer: {"schema": {"type": shape}}}
    else:
        answer["content"] = {JSON: {"schema": schema_of[operation.answer]}}
    may_stream = operation.chunk is not None and operation.answer != _EVENTS
    if may_stream:
        events = _event_schema(operation, schema_of)
        answer["content"][_EVENTS] = {"schema": events}
        answer["headers"] = _ENGINES
    responses = {str(operation.status): answer}
    for status in sorted(operation.errors):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {JSON: {"schema": schema_of[operation.error]}},
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
    parameters += operation.query
    if may_stream:
        parameters += [_TIMEOUT, *_RESUMPTION]
    if operation.may_wait:
        parameters.append(_EARLY_HEAD)
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if 401 in operation.errors:
        described["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return described


def _event_schema(
    operation: Operation, schema_of: dict[object, dict[str, object]]
) -> dict[str, object]:
    """Describes one event of a stream as an object of its fields. OpenAPI 3.1 does not define what
    the schema of an event stream describes, and readers of 3.1 interpret it this way."""
    data: dict[str, object] = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [schema_of[operation.chunk], schema_of[operation.error]]},
    }
    properties = {"data": data}
    if operation.named_events:
        properties["event"] = {"type": "string"}
    else:
        properties["data"] = {"anyOf": [{"const": "[DONE]"}, data]}
    id = {"type": "string", "description": "Present only if the request has an `idempotency-key`."}
    return {
        "type": "object",
        "description": operation.events,
        "properties": {**properties, "id": id},
        "required": sorted(properties),
    }
