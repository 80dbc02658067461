"""Lists every route: its methods, its bodies, and the statuses of its errors."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from swell.cluster.api import tokenize
from swell.cluster.api.admin import change_requests as changes
from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.bodies.protocol_base import ErrorBody
from swell.cluster.api.chat import protocol as chat
from swell.cluster.api.completions import protocol as completions
from swell.cluster.api.messages import protocol as anthropic
from swell.cluster.api.messages.message import Message, MessagesError, StreamEvent, TokenCount
from swell.cluster.api.pooling import protocol as pooling
from swell.cluster.api.responses import protocol as responses
from swell.cluster.api.responses.events import ResponseEvent
from swell.cluster.api.responses.response import ResponseBody, ResponseDeleted, ResponseItemList
from swell.cluster.api.sessions import session_bodies as sessions
from swell.cluster.text.schema.request_body import RequestBody

JSON = "application/json"
_KEY_ERRORS = (400, 401, 403)
_BODY_ERRORS = (*_KEY_ERRORS, 408, 413, 415)
_ANSWER_ERRORS = (*_BODY_ERRORS, 404, 409, 422, 429, 500)


class Operation(NamedTuple):
    """One method of one route. `answer` is a type, or the media type of an answer that has no
    type."""

    method: str
    path: str
    summary: str
    answer: type | str
    body: type[RequestBody] | None = None
    chunk: Any = None
    """The type of one event, if the answer may be streamed."""
    errors: tuple[int, ...] = ()
    status: int = 200
    error: type = ErrorBody
    events: str = (
        "With `stream: true`: events `data: JSON`, each a chunk or, after a failure, an error; the "
        "last one is `data: [DONE]`. Comments (`: ping`) leave while the stream waits."
    )
    named_events: bool = False
    """Whether the stream has `event:` lines with the type of each event; such streams do not send
    `[DONE]`."""
    may_wait: bool = False
    """Whether the request waits for an engine, so that an early head may be sent."""


_show = partial(Operation, "get", errors=_KEY_ERRORS)
_answer = partial(Operation, "post", errors=(*_ANSWER_ERRORS, 503), may_wait=True)
_stored = partial(Operation, errors=(*_KEY_ERRORS, 404, 503))
_convert = partial(Operation, "post", errors=(*_BODY_ERRORS, 404, 503), may_wait=True)
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
    Operation("get", "/openapi.json", "This document.", JSON),
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
    Operation(
        "post",
        "/v1/sessions",
        "Begin a session: a prompt that grows by chunks, each a request to `/v1/completions`.",
        sessions.SessionBody,
        sessions.CreateSessionRequest,
        errors=(*_BODY_ERRORS, 429, 503),
    ),
    _stored("get", "/v1/sessions/{id}", "How far a session has come.", sessions.SessionBody),
    _stored("delete", "/v1/sessions/{id}", "End a session.", sessions.SessionDeleted),
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
